"""Question answering about a text: the model of the paper's section 5.4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rbn.models.attention import AdditiveAttention, TanhOfTerms
from rbn.nn import LSTM, BatchNormLSTM, checks, init
from rbn.ops.types import InitialState, InputStats, Padding, valid_steps


@dataclass(frozen=True)
class Variant:
    """What a variant normalizes, and in which directions it reads.

    Attributes:
        normalized: the encoders are batch-normalized LSTMs.
        everywhere: the terms inside the tanh of attention and output are normalized, too.
        input_stats: statistics of the encoders' input term, ``"step"`` or ``"sequence"``.
        bidirectional: the encoders also read texts backwards.
    """

    normalized: bool = True
    everywhere: bool = True
    input_stats: InputStats = "step"
    bidirectional: bool = False


VARIANTS = {
    "lstm": Variant(normalized=False, everywhere=False),
    "bi-lstm": Variant(normalized=False, everywhere=False, bidirectional=True),
    "bn-lstm": Variant(everywhere=False),
    "bn-everywhere": Variant(),
    "bn-e*": Variant(input_stats="sequence"),
    "bn-e**": Variant(input_stats="sequence", bidirectional=True),
}
OUTPUTS = ("entities", "vocabulary")
INITIALIZATIONS = ("orthogonal", "code")


class AttentiveReader(nn.Module):
    r"""The Attentive Reader of Hermann et al. (2015), in the variants of the paper.

    With d_t the states of the document encoder and q the final states of the question encoder:

    $$
    \begin{align*}
    r &= \sum_t s_t d_t, \quad s_t \propto \exp(w^\top \tanh(W_d d_t + W_q q + b)) \\
    g &= \tanh(W_r r + W_g q + b_g) \\
    p(a) &\propto \exp(W_a g + b_a)
    \end{align*}
    $$

    Options that the paper does not mention come from the authors' code, branch ``bn`` of
    `cooijmanstim/Attentive_reader` (files below are in its ``codes/att_reader``).

    Symbols are numbers from 0 to vocabulary - 1; `entities` consecutive ones are the entities.

    Args:
        vocabulary: number of symbols.
        entities: number of symbols that stand for entities.
        first_entity: the first of these symbols.
        hidden_size: units H of each encoder and direction, and of both tanh layers.
        variant: ``"lstm"``, plain LSTMs; ``"bn-lstm"``, batch-normalized LSTMs;
            ``"bn-everywhere"``, which also normalizes each term inside a tanh of attention and
            output; ``"bn-e*"``, which also uses sequencewise statistics of the encoders' input;
            ``"bn-e**"``, which also reads in two directions, where the second reverses only the
            unpadded part. Not in the paper: ``"bi-lstm"``, the plain LSTM in two directions.
        embedding_size: size of the symbol embeddings, shared by both encoders; H by default.
        output: the answer is one of the ``"entities"``, or any symbol of the ``"vocabulary"``.
        bidirectional: overrides the variant's.
        dropout: rate of dropout on the symbol embeddings and on g; the authors' script uses 0.5.
        gamma: initial value of every scale.
        eps: added to every variance.
        momentum: weight of a new minibatch in running statistics.
        padding: ``"exclude"``, or ``"include"`` for the authors' per-step statistics, which count
            padded rows. The attention's statistics never count them.
        sync_stats: compute minibatch statistics over all processes that train together, as in
            `rbn.BatchNormLSTM`.
        max_document: document steps with population statistics; None grows with the data.
        max_question: question steps with population statistics; None grows with the data.
        initial_state: initial states of the encoders, ``"learned"`` or ``"zeros"``.
        bilinear: adds a similarity of document state and question to the attention, as in
            `AdditiveAttention`. It is ``use_dq_sims`` in the authors' ``model.py``, on in all five
            runs of their Figure 4a, according to the file names in their ``plot.py``.
        document_skip: adds the mean of the document's states to g as a third term, normalized in
            the variants that normalize everywhere. It is ``use_desc_skip_c_g`` in the authors'
            ``model.py``, on for bn-e* and bn-e** in their Figure 4a.
        initialization: how the encoders start. ``"orthogonal"``, as in the paper's other
            experiments: orthogonal weights, forget bias 1, learned initial cells. ``"code"``, as in
            the authors' ``layers.py`` and ``utils.py``: `rbn.init.repeated_gates_`, forget bias 0,
            initial cells fixed at 0.
    """

    def __init__(
        self,
        vocabulary: int,
        entities: int,
        first_entity: int = 0,
        hidden_size: int = 240,
        variant: str = "bn-e**",
        *,
        embedding_size: int | None = None,
        output: str = "entities",
        bidirectional: bool | None = None,
        dropout: float = 0.0,
        gamma: float = 0.1,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        padding: Padding = "exclude",
        sync_stats: bool = False,
        max_document: int | None = None,
        max_question: int | None = None,
        initial_state: InitialState = "learned",
        bilinear: bool = False,
        document_skip: bool = False,
        initialization: str = "orthogonal",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kind = VARIANTS[checks.choice("variant", variant, tuple(VARIANTS))]
        self.variant = variant
        self.vocabulary = checks.positive_integer("vocabulary", vocabulary)
        self.entities = checks.positive_integer("entities", entities)
        if not 0 <= checks.integer("first_entity", first_entity) <= vocabulary - entities:
            raise ValueError(
                f"first_entity must be from 0 to {vocabulary - entities}, so that {entities} "
                f"entities are among the {vocabulary} symbols, got {first_entity}"
            )
        self.first_entity = first_entity
        self.hidden_size = checks.positive_integer("hidden_size", hidden_size)
        self.output = checks.choice("output", output, OUTPUTS)
        self.dropout = checks.probability("dropout", dropout)
        both = kind.bidirectional if bidirectional is None else bidirectional
        size = hidden_size
        if embedding_size is not None:
            size = checks.positive_integer("embedding_size", embedding_size)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        shared: dict[str, Any] = {"bidirectional": both, "initial_state": initial_state, **made}
        checks.choice("padding", padding, ("exclude", "include"))
        checks.boolean("bilinear", bilinear)
        self.document_skip = checks.boolean("document_skip", document_skip)
        checks.choice("initialization", initialization, INITIALIZATIONS)
        normalization: dict[str, Any] = {
            "gamma": checks.not_negative("gamma", gamma),
            "eps": checks.not_negative("eps", eps),
            "momentum": None if momentum is None else checks.probability("momentum", momentum),
            "sync_stats": sync_stats,
        }

        def encoder(longest: int | None) -> nn.Module:
            if not kind.normalized:
                return LSTM(size, hidden_size, **shared)
            return BatchNormLSTM(
                size,
                hidden_size,
                max_length=longest,
                input_stats=kind.input_stats,
                padding=padding,
                **normalization,
                **shared,
            )

        self.embedding = nn.Embedding(vocabulary, size, **made)
        self.document = encoder(max_document)
        self.question = encoder(max_question)
        width = hidden_size * (2 if both else 1)
        terms: dict[str, Any] = {
            "normalized": kind.everywhere,
            "normalization": normalization,
        } | made
        self.attention = AdditiveAttention(width, width, hidden_size, bilinear=bilinear, **terms)
        skipped = width if document_skip else None
        self.join = TanhOfTerms(width, width, hidden_size, skipped, **terms)
        self.softmax = nn.Linear(
            hidden_size, entities if output == "entities" else vocabulary, **made
        )
        nn.init.xavier_uniform_(self.embedding.weight)
        nn.init.xavier_uniform_(self.softmax.weight)
        nn.init.zeros_(self.softmax.bias)
        if initialization == "code":
            self._start_as_the_code()

    def _start_as_the_code(self) -> None:
        encoders = nn.ModuleList([self.document, self.question])
        init.repeated_gates_(encoders)
        init.forget_bias_(encoders, 0.0)
        for name, parameter in encoders.named_parameters():
            if name.rpartition(".")[2].startswith("c0"):
                parameter.requires_grad_(False)  # it is already 0

    def forward(
        self,
        document: Tensor,
        question: Tensor,
        document_lengths: Tensor | None = None,
        question_lengths: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Score the answers to a batch of questions, each about its document.

        Args:
            document: symbols, integers ``[T, B]``. Padded positions may hold any symbol.
            question: symbols, integers ``[S, B]``.
            document_lengths: number of unpadded symbols of each document, integers ``[B]``, each at
                least 1; T by default.
            question_lengths: number of unpadded symbols of each question, integers ``[B]``; S by
                default.

        Returns:
            Logits ``[B, entities]`` or ``[B, vocabulary]``, and the attention weights ``[T, B]``
            over the document, 0 at padded positions.
        """
        if document.dim() != 2 or question.dim() != 2 or document.shape[1] != question.shape[1]:
            raise ValueError(
                "document and question must be [T, B] and [S, B] with the same B, got shapes "
                f"{tuple(document.shape)} and {tuple(question.shape)}"
            )
        for name, symbols in (("document", document), ("question", question)):
            if not checks.is_symbols(symbols):
                raise TypeError(f"{name} must hold integer symbols, got {symbols.dtype}")
            checks.symbols_within(name, symbols, self.vocabulary)
        device, batch = document.device, document.shape[1]
        document_lengths = checks.lengths(document_lengths, document.shape[0], batch, device)
        question_lengths = checks.lengths(question_lengths, question.shape[0], batch, device)
        states, _ = self.document(self._embed(document), lengths=document_lengths)
        _, (final, _) = self.question(self._embed(question), lengths=question_lengths)
        asked = torch.cat(list(final), dim=-1)  # [B, H * directions]
        valid = valid_steps(document_lengths, document.shape[0])
        result, weights = self.attention(states, asked, valid)
        mean = _mean_of_unpadded(states, valid) if self.document_skip else None
        joined = self.join(result, asked, c=mean)
        logits: Tensor = self.softmax(nn.functional.dropout(joined, self.dropout, self.training))
        return logits, weights

    def classes(self, answers: Tensor) -> Tensor:
        """The class of each answer symbol, int64: its index among the logits."""
        return answers.long() - (self.first_entity if self.output == "entities" else 0)

    def symbols(self, classes: Tensor) -> Tensor:
        """The symbol of each class; inverse of `classes`."""
        return classes + (self.first_entity if self.output == "entities" else 0)

    def _embed(self, symbols: Tensor) -> Tensor:
        vectors = self.embedding(symbols.long())
        return nn.functional.dropout(vectors, self.dropout, self.training)


def _mean_of_unpadded(states: Tensor, valid: Tensor | None) -> Tensor:
    """The mean of states ``[T, B, D]`` over the unpadded positions ``[T, B]``: ``[B, D]``."""
    if valid is None:
        return states.mean(0)
    total = torch.einsum("tb,tbd->bd", valid.to(states.dtype), states)
    return total / valid.sum(0)[:, None].to(total.dtype)
