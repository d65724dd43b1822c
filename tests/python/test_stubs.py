# SPDX-License-Identifier: Apache-2.0
"""The stubs that the build makes of the engine's bindings (cmake/stubs.py)."""

import ast
import re

from docs.raised import ROOT

from lamina import _lamina

TEXT = (ROOT / "python/lamina/_lamina.pyi").read_text()


def test_the_stubs_have_the_names_of_the_engine():
    nodes = ast.parse(TEXT).body
    stubbed = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stubbed |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign)} - {"__all__"}
    assert stubbed == {name for name in dir(_lamina) if not name.startswith("__")}


def test_no_type_is_left_out_or_one_of_cpp():
    assert not re.findall(r"^ *def .*: \.\.\.[,)].*$", TEXT, re.MULTILINE)
    assert "::" not in re.sub(r'""".*?"""', "", TEXT, flags=re.DOTALL)
