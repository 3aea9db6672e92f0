"""Questions about news: the CNN and Daily Mail archives, and questions made from articles."""

from rbn.data.cnn.baselines import baselines
from rbn.data.cnn.batches import Batch, QuestionBatches
from rbn.data.cnn.passages import Passages, Reading
from rbn.data.cnn.question import MalformedQuestion, Question
from rbn.data.cnn.sets import load_questions
from rbn.data.cnn.vocabulary import Vocabulary

__all__ = [
    "Batch",
    "MalformedQuestion",
    "Passages",
    "Question",
    "QuestionBatches",
    "Reading",
    "Vocabulary",
    "baselines",
    "load_questions",
]
