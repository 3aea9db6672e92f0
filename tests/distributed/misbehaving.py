"""Failures of one process while others wait for it; a separate file, so that it starts fast."""

import os
import time


def misbehave(how):
    if os.environ["RANK"] == "1":
        if how == "exit":
            os._exit(3)
        raise ValueError("rank 1 has much to say: " + 10**6 * "x")
    time.sleep(600)
