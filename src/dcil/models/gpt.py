"""GPT: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019."""

from __future__ import annotations

import math

from torch import Tensor, nn

from dcil.errors import UserError
from dcil.models.transformer import Block, heads_of


class GPT(nn.Module):
    """Predict each next token: int64 tokens (N, T), T up to `size`, to logits (N, T, `classes`).

    Embeddings of tokens (wte) and positions (wpe), `layers` causal blocks, a norm layer and a head without bias whose
    weight is that of the token embedding, unless not `tied`. GELU is the exact one; GPT-2 approximates it.
    """

    def __init__(
        self, layers: int, width: int, classes: int = 256, size: int = 256, dropout: float = 0.0, tied: bool = True
    ) -> None:
        super().__init__()
        heads = heads_of(f"gpt-{layers}-{width}", layers, width)
        self.tied = tied
        self.wte = nn.Embedding(classes, width)
        self.wpe = nn.Embedding(size, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, True, dropout, eps=1e-5) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=False)
        if tied:
            self.head.weight = self.wte.weight
        initialize(self, layers)

    def forward(self, tokens: Tensor) -> Tensor:
        length, most = tokens.shape[-1], self.wpe.num_embeddings
        if length > most:
            raise UserError(f"a sequence must have at most {most} tokens, got {length}")
        x = self.drop(self.wte(tokens) + self.wpe.weight[:length])
        out: Tensor = self.head(self.norm(self.blocks(x)))
        return out

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters that are not decayed besides vectors, as timm's networks do."""
        return {"wte.weight", "wpe.weight", *(["head.weight"] if self.tied else [])}


def initialize(model: GPT, layers: int) -> None:
    """Draw weights from N(0, 0.02^2), and those that end a residual branch with 1 / sqrt(2 layers) of it (GPT-2).

    The sum of the branches, two per block, then has the same variance at every depth.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and not module.weight.is_meta:
            ends_branch = name.endswith(("attn.proj", "mlp.fc2"))
            nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * layers) if ends_branch else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
