"""The router's image stays small and it starts fast: nothing that it imports brings torch."""

import subprocess
import sys

PROGRAM = """
import sys
import {module}
heavy = sorted({{"torch", "nixl", "transformers", "ray"}} & set(sys.modules))
sys.exit(f"{module} imports {{heavy}}" if heavy else 0)
"""


def run(module: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(module=module)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_router_imports_no_torch():
    result = run("router.app")
    assert result.returncode == 0, result.stderr


def test_an_import_of_torch_is_noticed():
    result = run("torch")
    assert "torch imports ['torch'" in result.stderr
