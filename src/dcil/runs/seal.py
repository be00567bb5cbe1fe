"""Seals: JSON objects that hold the SHA-256 of their other fields, so that a change by hand is noticed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

FIELD = "sha256"


def seal(record: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the fields other than the seal, whatever their order and layout."""
    rest = {key: value for key, value in record.items() if key != FIELD}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``record`` with its seal."""
    return {**record, FIELD: seal(record)}


def unsealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``record`` without its seal, which must fit; files of earlier versions have none."""
    if record.get(FIELD, said := seal(record)) != said:
        raise ValueError("it was changed after it was written, its checksum is another")
    return {key: value for key, value in record.items() if key != FIELD}
