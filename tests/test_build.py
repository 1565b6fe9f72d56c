"""What setup.py says when the environment does not fit, what a source distribution holds, what the import refuses."""

import os
import re
import subprocess
import sys
import tarfile
import textwrap
from pathlib import Path

import pytest
import torch

from torchtp import _extension

ROOT = Path(__file__).parents[1]


def _run_setup(prelude, command="build_ext", **environment):
    """setup.py's exit status and output, after `prelude` has changed what it will find."""
    program = textwrap.dedent(prelude) + f"\nimport sys, runpy; sys.argv = ['setup.py', {command!r}, '--help']"
    program += "\nrunpy.run_path('setup.py', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


NO_TORCH = "import sys; sys.modules['torch'] = None"
OLD_TORCH = (
    "import sys, types; sys.modules['torch'] = types.ModuleType('torch'); sys.modules['torch'].__version__ = '{}'"
)


def test_without_torch_one_sentence_says_what_to_do():
    status, output = _run_setup(NO_TORCH)
    assert status == 1
    assert "pip install --no-build-isolation ." in output and "Traceback" not in output
    assert len(output.strip().splitlines()) == 1


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0+cpu", "1.13.0"])
def test_a_torch_we_do_not_know_is_refused(version):
    status, output = _run_setup(OLD_TORCH.format(version))
    assert status == 1
    assert "2.11 to 2.15" in output and version in output
    assert len(output.strip().splitlines()) == 1


def test_a_wrong_wish_for_cuda_is_refused():
    status, output = _run_setup("", TORCHTP_CUDA="yes")
    assert status == 1 and "'yes'" in output and "Traceback" not in output


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch can build for CUDA")
def test_a_cuda_build_needs_a_cuda_torch():
    status, output = _run_setup("", TORCHTP_CUDA="1")
    assert status == 1 and "install a CUDA torch" in output and "Traceback" not in output


def test_source_distribution_needs_no_torch_and_holds_every_source(tmp_path):
    program = f"{NO_TORCH}; import runpy; runpy.run_path('setup.py', run_name='__main__')"
    subprocess.run(
        [sys.executable, "-c", program, "-q", "egg_info", "-e", tmp_path, "sdist", "-d", tmp_path],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = [path for folder in ("csrc", "tests", "tools", "torchtp") for path in (ROOT / folder).rglob("*")]
    wanted = [path for path in wanted if path.suffix in (".h", ".cpp", ".cu", ".py", ".typed")]
    missing = {str(path.relative_to(ROOT)) for path in wanted} - names
    assert not missing
    assert {"setup.py", "pyproject.toml", "Makefile", "LICENSE", "README.md"} <= names
    assert not any(name.endswith(".so") for name in names)


def test_the_compiled_module_says_what_it_was_built_for():
    built = _extension.built_for(_extension.find())
    assert built.torch == torch.__version__.split("+")[0]
    assert built.cuda in (None, torch.version.cuda)


@pytest.mark.parametrize(
    ("built_torch", "built_cuda", "torch_version", "torch_cuda", "message"),
    [
        ("2.13.0", None, "2.13.1", None, "built for torch 2.13.0, but torch 2.13.1"),
        ("2.13.0", None, "2.14.0+cu130", "13.0", "built for torch 2.13.0"),
        ("2.13.0", "13.0", "2.13.0+cpu", None, "made for CUDA none"),
        ("2.13.0", "13.0", "2.13.0", "12.8", "made for CUDA 12.8"),
    ],
)
def test_another_torch_is_refused(built_torch, built_cuda, torch_version, torch_cuda, message):
    built = _extension.BuiltFor(Path("_C.so"), built_torch, built_cuda)
    with pytest.raises(ImportError, match=re.escape(message) + ".*pip install"):
        _extension.check(built, torch_version, torch_cuda)


@pytest.mark.parametrize(
    ("built_cuda", "torch_version", "torch_cuda"),
    [(None, "2.13.0+cpu", None), (None, "2.13.0+cu130", "13.0"), ("13.0", "2.13.0+cu132", "13.2")],
)
def test_a_torch_that_fits_is_accepted(built_cuda, torch_version, torch_cuda):
    _extension.check(_extension.BuiltFor(Path("_C.so"), "2.13.0", built_cuda), torch_version, torch_cuda)


def test_a_file_that_is_not_ours_is_refused(tmp_path):
    (tmp_path / "_C.so").write_bytes(b"something else")
    with pytest.raises(ImportError, match="not a compiled module of torchtp"):
        _extension.built_for(tmp_path / "_C.so")
