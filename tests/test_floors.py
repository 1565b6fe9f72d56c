"""The house rules that a machine can check: who includes whom, who imports whom, sizes, owners of handles, names."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"
MAX_LINES = 400

# A folder includes itself and folders of lower floors, nothing else.
FLOORS = {
    "core": 0,
    "shm": 1,
    "net": 1,
    "collectives": 2,
    "kernels": 2,
    "exchange": 3,
    "backend": 4,
    "spatial": 5,
    "gradients": 5,
    "bindings": 6,
}
TORCH_HEADER = re.compile(r"(ATen|c10|torch|caffe2|pybind11)/|Python\.h")
# The floors without torch, and what each may still see of it: number formats, the stream's device.
TORCH_FREE = {
    "core": r"(?!)",
    "shm": r"(?!)",
    "net": r"(?!)",
    "collectives": r"(c10/util|torch/headeronly/util)/(Half|BFloat16|complex)\.h|c10/core/ScalarType\.h",
    "exchange": r"(?!)",
    "kernels": r"(c10/util|torch/headeronly/util|c10/cuda)/.*\.h",
}
# What must be born inside an owning class of core/. A leading `.` or `>` makes it a method of something else.
RAW_HANDLE = re.compile(
    r"(?<![\w.>:])(?:::)?(mmap|munmap|open|openat|socket|socketpair|accept4?|memfd_create|eventfd|epoll_create1?"
    r"|malloc|calloc|pthread_create|cudaMalloc\w*|shm_open|dlopen)\s*\("
    r"|(?<![\w.>])(new)\s+[\w:(]|\bdelete(?:\[\])?\s+\w"
)


def _tracked(*suffixes):
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode == 0:
        files = [ROOT / name for name in listed.stdout.splitlines()]
    else:  # an unpacked source distribution
        files = [path for path in ROOT.rglob("*") if not re.search(r"/(\.venv|build|dist|\.git)[^/]*/", str(path))]
    return [path for path in files if path.is_file() and path.suffix in suffixes]


def _cpp_files():
    return _tracked(".h", ".cpp", ".cu")


def _code(path):
    """The file without comments and the contents of strings."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.S)
    return re.sub(r'"(?:[^"\\\n]|\\.)*"', '""', text)


def _name(path):
    return str(path.relative_to(ROOT))


def test_every_folder_of_csrc_has_a_floor():
    folders = {path.relative_to(CSRC).parts[0] for path in _cpp_files() if path.is_relative_to(CSRC)}
    assert folders <= set(FLOORS)


def test_a_folder_includes_only_lower_floors():
    wrong = []
    for path in _cpp_files():
        if not path.is_relative_to(CSRC):
            continue
        folder = path.relative_to(CSRC).parts[0]
        for included in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.M):
            other = included.split("/")[0]
            if "/" not in included or other not in FLOORS:
                wrong.append(f"{_name(path)} includes {included}: write it from csrc, as folder/file.h")
            elif other != folder and FLOORS[other] >= FLOORS[folder]:
                wrong.append(f"{_name(path)} includes {included}: {other} is not below {folder}")
    assert not wrong, "\n".join(wrong)


def test_the_lower_floors_know_no_torch():
    wrong = []
    for path in _cpp_files():
        folder = path.relative_to(CSRC).parts[0] if path.is_relative_to(CSRC) else None
        for included in re.findall(r"^\s*#\s*include\s+<([^>]+)>", path.read_text(), re.M):
            allowed = TORCH_FREE.get(folder)
            if allowed and TORCH_HEADER.match(included) and not re.fullmatch(allowed, included):
                wrong.append(f"{_name(path)} includes <{included}>")
    assert not wrong, "\n".join(wrong)


def test_schemas_stand_on_one_page():
    pages = {_name(path) for path in _cpp_files() if re.search(r"\bTORCH_LIBRARY(_FRAGMENT)?\s*\(", _code(path))}
    assert pages == {"csrc/bindings/schemas.cpp"}
    pybind = {_name(path) for path in _cpp_files() if "PYBIND11_MODULE" in _code(path)}
    assert pybind == {"csrc/bindings/module.cpp"}


def test_handles_are_born_in_core():
    wrong = []
    for path in _cpp_files():
        if not path.is_relative_to(CSRC) or path.is_relative_to(CSRC / "core"):
            continue
        for number, line in enumerate(_code(path).splitlines(), 1):
            if found := RAW_HANDLE.search(line):
                wrong.append(f"{_name(path)}:{number}: {found.group(0).strip()}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("line", "raw"),
    [
        ("int fd = ::open(name, O_RDONLY);", True),
        ("auto* p = new Thing();", True),
        ("void* p = mmap(nullptr, n, 0, 0, fd, 0);", True),
        ("delete[] rows;", True),
        ("file.open(name);", False),
        ("Fd fd = Fd::socket();", False),
        ("renew(x);", False),
        ("Thing(const Thing&) = delete;", False),
    ],
)
def test_raw_handles_are_recognised(line, raw):
    assert bool(RAW_HANDLE.search(line)) == raw


def test_files_are_pages():
    sizes = {_name(path): len(path.read_text().splitlines()) for path in _tracked(".h", ".cpp", ".cu", ".py", ".pyi")}
    assert {name: lines for name, lines in sizes.items() if lines > MAX_LINES} == {}


def test_headers_are_guarded_by_pragma_once():
    assert [_name(path) for path in _tracked(".h") if "#pragma once" not in path.read_text()] == []


def test_no_file_names_a_machine():
    place = re.compile("/(" + "|".join(["wo" + "rk", "ro" + "ot", "ho" + "me", "Us" + "ers"]) + r")/\w")
    suffixes = (".h", ".cpp", ".cu", ".py", ".pyi", ".md", ".toml", ".json", ".in", "", ".yml")
    assert [_name(path) for path in _tracked(*suffixes) if place.search(path.read_text())] == []


def _imports(path):
    """The modules of torchtp that a file imports when it is loaded (imports inside functions come later)."""
    tree = ast.parse(path.read_text())
    pending, found = list(tree.body), set()
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{_name(path)}: write imports in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return found


def _modules():
    return {
        _name(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
        for path in _tracked(".py")
        if path.is_relative_to(ROOT / "torchtp")
    }


def test_python_modules_import_only_downwards():
    modules = _modules()
    graph = {name: (_imports(path) & set(modules)) - {name, "torchtp"} for name, path in modules.items()}
    done, wrong = set(), []

    def visit(name, trail):
        if name in trail:
            wrong.append(" -> ".join([*trail[trail.index(name) :], name]))
        elif name not in done:
            # A package's __init__ imports its parts; a part that names its package only names a place.
            for other in graph[name]:
                if not name.startswith(other + "."):
                    visit(other, [*trail, name])
            done.add(name)

    for name in graph:
        visit(name, [])
    assert not wrong, "\n".join(wrong)


def test_only_the_face_is_imported_from_outside_and_nothing_imports_the_face():
    modules = _modules()
    wrong = []
    for name, path in modules.items():
        for imported in _imports(path):
            parent, _, last = imported.rpartition(".")
            if parent == "torchtp" and imported not in modules and last != "_C" and name != "torchtp":
                wrong.append(f"{name} imports {last} from torchtp itself: import it from the module it lives in")
    assert not wrong, "\n".join(wrong)


def test_a_kernel_has_its_cpu_side_and_its_header():
    kernels = {path.stem.removesuffix("_cuda") for path in _tracked(".cu")}
    assert all((CSRC / "kernels" / f"{name}.h").exists() for name in kernels)
    assert all((CSRC / "kernels" / f"{name}_cpu.cpp").exists() for name in kernels)


def test_an_op_has_the_same_name_in_schema_source_and_test():
    schemas = (CSRC / "bindings" / "schemas.cpp").read_text()
    ops = set(re.findall(r'"(\w+)\(', schemas))
    assert ops
    sources = "\n".join(path.read_text() for path in (CSRC / "spatial").glob("*"))
    tests = "\n".join(path.read_text() for path in _tracked(".py") if path.is_relative_to(ROOT / "tests"))
    without_source = {op for op in ops if not re.search(rf"\b{op}\b", sources)}
    stems = {re.sub(r"(_double_backward|_backward|_start|_finish)$", "", op) for op in ops}
    without_test = {stem for stem in stems if not re.search(rf"\b{stem}", tests)}
    assert not without_source and not without_test


def test_the_stub_names_what_the_compiled_module_has():
    from torchtp import _C

    stub = ast.parse((ROOT / "torchtp" / "_C.pyi").read_text())
    named = {node.name for node in stub.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    named |= {node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)}
    assert named == {name for name in dir(_C) if not name.startswith("_")}
