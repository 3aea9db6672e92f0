"""What is trained: models made of the layers."""

from rbn.models.classifier import SequenceClassifier

__all__ = ["SequenceClassifier"]
