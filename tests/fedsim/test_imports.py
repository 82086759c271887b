"""Tests of imports: packages that must work without Flower and Ray or start fast, and the names that packages export."""

import subprocess
import sys

import pytest

HEAVY = ("flwr", "ray", "pydantic", "typer", "sklearn", "skimage", "rich", "matplotlib")


def fresh(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)


def test_defenses_wire_and_models_work_without_flower_or_ray() -> None:
    done = fresh(
        "import sys\n"
        "sys.modules['flwr'] = sys.modules['ray'] = None\n"
        "import defenses, fedsim.recording, fedsim.models\n"
        "defense = defenses.DefenseSpec.parse('clip(1) | gaussian(0.1)').build()\n"
        "data = fedsim.recording.DataSpec(shape=(1, 8, 8), num_classes=2)\n"
        "fedsim.models.build(fedsim.recording.ModelSpec(name='lenet_cpl'), data)\n"
        f"print([name for name in {HEAVY} if sys.modules.get(name) is not None])"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_clients_modules_can_be_imported_without_flower_or_ray() -> None:
    names = ("truth", "data", "data.partition", "training.batches", "training.local")
    modules = ", ".join(f"fedsim.{name}" for name in names)
    done = fresh(
        f"import sys\nsys.modules['flwr'] = sys.modules['ray'] = None\nimport {modules}\n"
        "for name in ('photos', 'digits', 'lfw_patches'): fedsim.data.load(name)\n"
        "print([name for name in ('sklearn', 'skimage', 'scipy') if name in sys.modules])"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]", "every client process would spend seconds on the import"


@pytest.mark.parametrize(
    ("modules", "slow"),
    [
        ("fedsim.cli", ("flwr", "ray", "torch", "sklearn", "skimage")),
        ("attacker.replay.executors.replay_worker, attacker.service.worker.main", ("torch", "numpy", "pydantic")),
    ],
)
def test_command_line_and_workers_import_nothing_slow(modules: str, slow: tuple[str, ...]) -> None:
    """Otherwise `--help` takes seconds.

    Until a worker handles signals and redirects stdout, Ctrl-C kills it, and output of imports mixes with its answers.
    """
    done = fresh(f"import sys\nimport {modules}\nprint([name for name in {slow} if name in sys.modules])")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "defenses",
            "DEFENSES Channel Defense DefenseSpec Kind State Update add_feedback chain clip clip_each dgc gaussian global_norm "
            "gradient_dropout identity in_gradient_units laplace masked prune qsgd random_k sign stateless top_k uniform "
            "withhold",
        ),
        (
            "fedsim.recording",
            "Column DamagedFile DataSpec Manifest ModelSpec Observation Payload Recorder Recording Reply Row Training "
            "find_recording find_run",
        ),
        (
            "fedsim.models",
            "MAX_PARAMETERS MODELS ModuleSpec admit adopt_precision build build_layout check_loss find_client_types find_head "
            "find_loss has_head identify_network list_buffers list_warnings list_unsimulated predict_classes "
            "predict_probabilities require_mode",
        ),
        ("attacker.report", "build"),
    ],
)
def test_packages_export_exactly_these_names(module: str, names: str) -> None:
    from importlib import import_module

    found = import_module(module)
    assert sorted(found.__all__) == sorted(names.split())
    assert all(hasattr(found, name) for name in found.__all__)


def test_telemetry_of_flower_and_ray_is_off() -> None:
    done = fresh("import os\nimport fedsim\nprint(os.environ['FLWR_TELEMETRY_ENABLED'], os.environ['RAY_USAGE_STATS_ENABLED'])")
    assert done.stdout.split() == ["0", "0"]
