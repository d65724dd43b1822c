# SPDX-License-Identifier: Apache-2.0
"""dist_lost.py LOST: rank LOST of two ends without a word, while the other one waits for it."""

import os
import sys

import pytest

import lamina
from lamina import dist

dist.initialize_dist("cpu", timeout=100)
dist.barrier()
if dist.get_global_rank() == int(sys.argv[1]):
    os._exit(0)
with pytest.raises(lamina.PeerError, match=r"\[rank \d/2\]"):
    if dist.get_global_rank() == 0:
        dist.all_gather_object(0)
    else:
        with dist.local_rank_zero_download_and_wait("never"):
            pass
