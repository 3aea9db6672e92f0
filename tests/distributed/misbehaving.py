"""What a process may do when others count on it; in a file of its own, for it to start soon."""

import os
import time


def misbehave(how):
    if os.environ["RANK"] == "1":
        if how == "exit":
            os._exit(3)
        raise ValueError("rank 1 has much to say: " + 10**6 * "x")
    time.sleep(600)
