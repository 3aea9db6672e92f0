"""The models of the paper's experiments."""

from rbn.models.attentive_reader import AttentiveReader
from rbn.models.classifier import SequenceClassifier
from rbn.models.language_model import LanguageModel

__all__ = ["AttentiveReader", "LanguageModel", "SequenceClassifier"]
