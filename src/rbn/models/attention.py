"""Additive attention, with or without batch normalization of its terms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rbn.nn import init
from rbn.nn.batch_norm_term import BatchNormTerm


class TanhOfTerms(nn.Module):
    r"""A hidden layer of two or three inputs: $\tanh(W_a a + W_b b + \mathrm{bias})$.

    If normalized, each term has its own BN:
    $\tanh(\mathrm{BN}(W_a a; \gamma_a, 0) + \mathrm{BN}(W_b b; \gamma_b, 0) +
    \mathrm{bias})$.

    Args:
        a_size: features of a.
        b_size: features of b.
        hidden_size: units H.
        c_size: features of a third input c, with the term $W_c c$; None for two inputs.
        normalized: whether to batch-normalize the terms.
        normalization: options of `BatchNormTerm`.
    """

    def __init__(
        self,
        a_size: int,
        b_size: int,
        hidden_size: int,
        c_size: int | None = None,
        *,
        normalized: bool,
        normalization: dict[str, Any],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight_a = nn.Parameter(torch.empty(hidden_size, a_size, **made))
        self.weight_b = nn.Parameter(torch.empty(hidden_size, b_size, **made))
        self.bias = nn.Parameter(torch.zeros(hidden_size, **made))
        self.norm_a: BatchNormTerm | None = None
        self.norm_b: BatchNormTerm | None = None
        if normalized:
            self.norm_a = BatchNormTerm(hidden_size, **normalization, **made)
            self.norm_b = BatchNormTerm(hidden_size, **normalization, **made)
        init.orthogonal_(self.weight_a)
        init.orthogonal_(self.weight_b)
        self.weight_c: nn.Parameter | None = None
        self.norm_c: BatchNormTerm | None = None
        if c_size is not None:
            self.weight_c = nn.Parameter(torch.empty(hidden_size, c_size, **made))
            init.orthogonal_(self.weight_c)
            if normalized:
                self.norm_c = BatchNormTerm(hidden_size, **normalization, **made)

    def forward(
        self,
        a: Tensor,
        b: Tensor,
        valid: Tensor | None = None,
        *,
        c: Tensor | None = None,
        shift: Tensor | None = None,
    ) -> Tensor:
        """Combine the inputs.

        Args:
            a: ``[T, B, a_size]``, or ``[B, a_size]``.
            b: ``[B, b_size]``, the same for all T.
            valid: unpadded positions of a, bool ``[T, B]``.
            c: ``[B, c_size]``, if there is a third input.
            shift: added to every unit before the tanh, ``[T, B, 1]``; never normalized.

        Returns:
            ``[T, B, H]``, or ``[B, H]``.
        """
        term_a = nn.functional.linear(a, self.weight_a)
        term_b = nn.functional.linear(b, self.weight_b)
        if self.norm_a is not None and self.norm_b is not None:
            term_a, term_b = self.norm_a(term_a, valid), self.norm_b(term_b)
        total = term_a + term_b + self.bias
        if c is not None and self.weight_c is not None:
            term_c = nn.functional.linear(c, self.weight_c)
            total = total + (term_c if self.norm_c is None else self.norm_c(term_c))
        if shift is not None:
            total = total + shift
        return torch.tanh(total)


class AdditiveAttention(nn.Module):
    r"""Additive attention of a question over the positions of a document.

    $$
    \begin{align*}
    m_t &= \tanh(W_d d_t + W_q q + b) \\
    s_t &\propto \exp(w^\top m_t), \quad t \text{ unpadded} \\
    r &= \sum_t s_t d_t
    \end{align*}
    $$

    Args:
        document_size: features of d_t.
        question_size: features of q.
        hidden_size: units of m_t.
        bilinear: adds the scalar similarity $(M d_t)^\top (M q)$ to every unit before the
            tanh, without normalization. M is initialized to 0.05 times an orthogonal matrix. Needs
            document_size equal to question_size. This is ``use_dq_sims`` of the authors' code
            (``build_attention`` in ``codes/att_reader/model.py``, branch ``bn`` of
            `cooijmanstim/Attentive_reader`); it is not in the paper's equations.
        options: options of `TanhOfTerms`.
    """

    def __init__(
        self,
        document_size: int,
        question_size: int,
        hidden_size: int,
        *,
        bilinear: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if bilinear and document_size != question_size:
            raise ValueError(
                "bilinear needs documents and questions with the same number of features, got "
                f"document_size {document_size} and question_size {question_size}"
            )
        self.match = TanhOfTerms(document_size, question_size, hidden_size, **options)
        bias = self.match.bias
        self.weight = nn.Parameter(torch.empty_like(bias))
        bound = hidden_size**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        self.similarity: nn.Parameter | None = None
        if bilinear:
            self.similarity = nn.Parameter(bias.new_empty(document_size, document_size))
            init.orthogonal_(self.similarity, 0.05)

    def forward(
        self, document: Tensor, question: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend to a document with a question.

        Args:
            document: ``[T, B, document_size]``; padded positions must be finite.
            question: ``[B, question_size]``.
            valid: unpadded positions of the document, bool ``[T, B]``; all by default.

        Returns:
            The weighted mean r ``[B, document_size]`` and the weights s ``[T, B]``, which are 0 at
            padded positions and sum to 1 over T.
        """
        shift = None
        if self.similarity is not None:
            # (M d)^T (M q) = d^T (M^T M q): avoids multiplying every document state with M.
            projected = nn.functional.linear(question, self.similarity) @ self.similarity
            shift = torch.einsum("tbd,bd->tb", document, projected)[:, :, None]
        scores = self.match(document, question, valid, shift=shift) @ self.weight
        if valid is not None:
            scores = scores.masked_fill(~valid, float("-inf"))
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = torch.softmax(scores, dim=0, dtype=wide).to(document.dtype)
        return torch.einsum("tb,tbd->bd", weights, document), weights
