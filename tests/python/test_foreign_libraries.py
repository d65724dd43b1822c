# SPDX-License-Identifier: Apache-2.0
"""Libraries that export to the whole process functions by OpenSSL's names, as TensorFlow's do BoringSSL's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from soak import SOAK

import lamina

LIBRARIES = sorted(Path(lamina._lamina.__file__).parent.glob("*.so"))

PROGRAM = """
import ctypes, hashlib, os, ssl  # those of Python are bound
import torch
foreign = lambda: {foreign}
if "{when}" == "before": foreign()
import lamina
if "{when}" == "after": foreign()
lamina.init(partitions=2, microbatches=2)
model = lamina.distribute(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
@lamina.step
def train(x):
    loss = model(x).sum()
    model.backward(loss)
    return loss
train(torch.ones(2, 4))
lamina.shutdown()
"""


def names(*arguments):
    lines = subprocess.run(["nm", "-D", *map(str, arguments)], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].partition("@")[0] for line in lines.splitlines() if line.strip() and ":" not in line}


def test_openssl_is_a_hidden_part_of_lamina():
    assert len(LIBRARIES) == 3
    of_openssl = re.compile("(EVP|HMAC|CRYPTO|OPENSSL|OSSL|SHA256)_")
    assert [name for name in names(*LIBRARIES) if of_openssl.match(name)] == []
    assert "libcrypto" not in subprocess.run(["ldd", *LIBRARIES], capture_output=True, text=True, check=True).stdout


@pytest.mark.multiprocess
@pytest.mark.parametrize("when", ["before", "after"] if SOAK else ["before"])
def test_a_job_trains_beside_a_library_that_exports_them(when, launcher):
    source, library = launcher.folder / "foreign.c", launcher.folder / "foreign.so"
    own = ["EVP_Digest", "CRYPTO_memcmp", "OPENSSL_init_crypto", "EVP_MD_CTX_new", "EVP_DigestUpdate", "HMAC"]
    source.write_text("void abort(void);\n" + "".join(f"void {name}(void) {{ abort(); }}\n" for name in own))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    runs(launcher, when, f"ctypes.CDLL({str(library)!r}, ctypes.RTLD_GLOBAL)")


def runs(launcher, when, foreign):
    program = launcher.folder / "program.py"
    program.write_text(PROGRAM.format(foreign=foreign, when=when))
    run = launcher.run("run", "-n", 2, program, env={"LAMINA_PYTHON": sys.executable})
    assert run.returncode == 0, run.stderr
