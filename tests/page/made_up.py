"""Responses of a fake service for one run with everything that the page shows."""

from fake import Fake, grid, job, listed, recording


def filled(fake: Fake, *, clients: list[str], rounds: int, name: str = "big") -> Fake:
    """Add the responses for a run with everything that the page shows, and return the fake service."""
    attack = {
        "source": "cpl-1",
        "attack": "cpl",
        "spec": "cpl()",
        "seed": 0,
        "null": False,
        "oracles": [],
        "knows_defense": True,
        "cases": 4,
        "done": 4,
        "failed": 0,
        "interrupted": 0,
        "waiting": 0,
        "examples": 4,
        "scored": 4,
        "success": 0.5,
        "labels": 0.5,
        "psnr": 20.0,
        "confidence": 0.5,
        "outcome": "recovered",
        "verdict": "recovered: 2 of 4 examples; the null recovered 0",
    }
    case = {
        "attack": "cpl-1",
        "case": "1",
        "client": clients[0],
        "rounds": [1],
        "examples": 2,
        "status": "done",
        "route": "optimisation",
        "iterations": 3,
        "seconds": 1.0,
        "loss": 0.1,
        "confidence": 0.5,
        "success": 0.5,
        "psnr": 20.0,
        "null_success": 0.0,
        "null_psnr": 8.0,
        "reason": None,
        "null": False,
    }
    example = {
        "n": 0,
        "batch": 1,
        "position": 0,
        "rounds": [1],
        "label": "cat",
        "confidence": 0.5,
        "image": "/page/icon.svg",
        "values": None,
        "original": "/page/icon.svg",
        "label_true": "dog",
        "success": True,
        "psnr": 20.0,
        "ssim": None,
        "lpips": None,
        "failure": None,
        "null": {"image": "/page/icon.svg", "values": None, "label": "cow", "success": False, "psnr": 8.0},
    }
    row = {"column": "age", "reconstruction": "41", "original": "40", "right": True}
    run = f"recordings/{name}"
    summary = recording(name, rounds=rounds, clients=len(clients))
    fake.answers |= {
        "recordings": listed([summary]),
        "jobs": listed(
            [job("1", state="running", started="2026-01-01T00:00:00Z"), job("2", state="failed", error="ValueError: no")]
        ),
        "jobs/1": job("1", state="running", started="2026-01-01T00:00:00Z", progress={"share": 0.5, "words": "1 of 2 cases"}),
        "jobs/2": job("2", state="failed", error="ValueError: no\nTraceback"),
        "attacks": listed(
            [{"name": "cpl", "summary": "L-BFGS.", "needs": [], "source": "", "arguments": {"steps": 300, "boxed": False}}]
        ),
        run: summary,
        f"{run}/grid": grid(clients, rounds),
        f"{run}/headline": {
            "sentence": "CPL recovered 2 of 4 private images; without the gradient it recovers 0 of 4.",
            "outcome": "recovered",
            "attack": "cpl-1",
            "spec": "cpl()",
            "updates": 5,
            "attacked": 4,
            "absent": 1,
            "attacks": 1,
            "cases": 4,
            "finished": 4,
            "failed": 1,
            "examples": 4,
            "psnr": 20.0,
            "null_psnr": 8.0,
            "worst": [{"attack": "cpl-1", "case": "1", "client": clients[0], "rounds": [1], "example": example}],
        },
        f"{run}/attacks": listed([attack]),
        f"{run}/leakage": listed(
            [
                {
                    "attack": "cpl",
                    "spec": "cpl()",
                    "null": False,
                    "round": n,
                    "examples": 2,
                    "success": 0.5,
                    "psnr": 20.0,
                    "confidence": 0.5,
                }
                for n in (1, 2)
            ]
        ),
        f"{run}/training": listed([{"round": n, "loss": 3.0 - n, "accuracy": 0.1 * n} for n in range(3)]),
        f"{run}/cases": listed([case]),
        f"{run}/observations": listed([]),
        f"{run}/cases/cpl-1/1": {
            **case,
            "loss": [[1, 3.0], [2, 0.3], [3, 0.1]],
            "oracles": ["labels"],
            "notes": ["a note"],
            "spec": "cpl()",
            "null": False,
            "examples": [
                example,
                {**example, "n": 1, "position": 1, "image": None, "original": None, "values": [row], "null": None},
            ],
        },
    }
    return fake
