"""Networks of texts to time: those of dcil, and BERT-tiny as transformers has it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dcil import models
from dcil.errors import missing_extra

#: Tokens of a sequence, and of the vocabulary of networks of ours.
LENGTH, VOCABULARY = 128, 256
BERT_TINY = "bert-tiny"


def reads_tokens(name: str) -> bool:
    return name == BERT_TINY or models.reads_tokens(name)


def build(name: str) -> nn.Module:
    return BertTiny() if name == BERT_TINY else models.build(name, VOCABULARY)


def tokens(batch: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(0))


class BertTiny(nn.Module):
    """Classify sequences by 2 layers of 128 channels, without padding: Turc et al., "Well-Read Students Learn Better",
    2019, the smallest; initialised at random."""

    def __init__(self) -> None:
        super().__init__()
        try:
            from transformers import BertConfig, BertForSequenceClassification
        except ModuleNotFoundError as error:
            raise missing_extra("transformers", "transformers") from error
        config = BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512)
        self.bert = BertForSequenceClassification(config)  # type: ignore[no-untyped-call, unused-ignore]

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.bert(input_ids=tokens).logits
        return logits
