"""The example on the README's first page runs as it is printed."""

import os
import re
from pathlib import Path

import torch
import torch.distributed as dist
from models import make_network

from benchmarks import summary
from torchtp.testing import run_ranks

README = Path(__file__).parents[1] / "README.md"


def test_figures_are_those_of_the_result_files():
    assert summary.BEGIN + summary.text() + summary.END in README.read_text()


def _run_example(program, folder):
    os.chdir(folder)
    torch.manual_seed(int(os.environ["RANK"]) // 2)  # ranks 0 and 1 hold parts of one image, 2 and 3 of another
    loader = [(torch.randn(1, 2, 13, 17), torch.randn(1, 1, 6, 8)) for _ in range(2)]
    scope = {"MyNetwork": lambda: make_network("convnext", dtype=torch.float32), "loader": loader}
    scope["criterion"] = torch.nn.MSELoss()
    exec(program, scope)
    parameters = torch.nn.utils.parameters_to_vector(scope["model"].parameters()).detach()
    dist.destroy_process_group()
    return parameters


def test_example_trains_and_saves_the_ordinary_model(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    results = run_ranks(_run_example, 4, program, tmp_path, backend=None, timeout=120.0)
    for parameters in results[1:]:
        torch.testing.assert_close(parameters, results[0], rtol=0, atol=0)
    model = make_network("convnext", dtype=torch.float32)
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    model.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert not torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()), before)
