import os

import torch
from hypothesis import settings

# Without a GPU its kernels run in Triton's interpreter, which has to be said before it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Small tensors gain nothing from a second thread, and lose much where other work shares the cores.
torch.set_num_threads(1)

# No deadline: a timing is never a test.
settings.register_profile("usual", deadline=None)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile("usual")
