"""A checkout on PYTHONPATH works in an environment where trl_ext is not installed."""

import os
import subprocess
import sys
import tempfile
import venv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tiny import Workshop

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment with all packages of this one except trl_ext."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for packages in (Path(entry) for entry in sys.path if entry.endswith("-packages")):
        for path in packages.iterdir():
            if "trl_ext" not in path.name and not (site / path.name).exists():
                (site / path.name).symlink_to(path)
    return folder / "bin" / "python"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    # Only the checkout, because `pip install --editable` puts metadata next to it
    for name in ("trl_ext", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    paths = [str(tmp_path), str(ROOT / "tests" / "support")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "ACCELERATE_USE_CPU": "true"}


def run(*command: object, environment: dict[str, str], folder: Path) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_dpo_and_grpo_train_and_the_reference_has_the_same_identity(python: Path, environment, tmp_path: Path):
    from trl_ext.reference.weights import identity_facts, identity_of

    said = run(python, __file__, environment=environment, folder=tmp_path)
    assert said.splitlines()[-1] == identity_of(identity_facts("weights", {}, {}))


@pytest.mark.slow
def test_the_command_line_runs(python: Path, environment, workshop: Workshop, tmp_path: Path):
    data = ROOT / "examples" / "demo" / "data" / "dpo"
    training = ["dpo", "--model_name_or_path", workshop.model("tied"), "--dataset_name", data, "--bf16", "false"]
    training += ["--max_steps", 1, "--use_cpu", "--max_length", 16, "--output_dir", tmp_path / "model"]
    said = run(python, "-m", "trl_ext.cli", "doctor", environment=environment, folder=tmp_path)
    assert "WRONG" not in said
    launched = ["-m", "accelerate.commands.launch", "--num_processes", 2, "--mixed_precision", "no", "-m"]
    run(python, *launched, "trl_ext.cli", *training, environment=environment, folder=tmp_path)
    assert (tmp_path / "model" / "model.safetensors").exists()


def _train() -> None:
    import trl_ext
    from short_training import Bench
    from trl_ext.reference.weights import identity_facts, identity_of

    with pytest.raises(PackageNotFoundError):
        version("trl_ext")
    assert Path(trl_ext.__file__).parents[1] == Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Workshop(Path(folder)), Path(folder) / "runs")
        bench.dpo(reference_store="disk", reference_store_dir=f"{folder}/store")
        assert list(Path(folder, "store").rglob("about.json"))
        bench.grpo()
    print(identity_of(identity_facts("weights", {}, {})))


if __name__ == "__main__":
    _train()
