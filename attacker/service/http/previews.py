"""Routes of the preview of a running job: its best reconstructions so far."""

import io
import os
from math import isfinite
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response
from PIL import Image

from attacker.service.http.caching import PNG_TYPE
from attacker.service.http.cases import IMAGE_RESPONSE
from attacker.service.http.dependencies import Service, ServiceComponents
from attacker.service.http.middleware import API_PREFIX
from attacker.service.http.queries import REFUSED_RESPONSES, Name, Number, check_parameters
from attacker.service.index.images import NoImage
from attacker.service.schemas.jobs import JobPreview, PreviewImage
from attacker.service.worker import preview_files as previews

router = APIRouter(
    prefix="/jobs/{id}/preview", tags=["jobs"], responses=REFUSED_RESPONSES, dependencies=[Depends(check_parameters)]
)

PreviewVersion = Annotated[
    int | None,
    Query(
        ge=0,
        lt=2**53,
        description="Ignored; a new value makes browsers request the image again. The response is always the newest preview.",
    ),
]


@router.get("", response_model=JobPreview)
def preview(service: Service, id: Name) -> JobPreview:
    """Return the best reconstructions of a running job so far.

    The status is 404 if the job is not running or has no intermediate images, as attacks on tables and attacks without a search.
    """
    seen = _read_preview(service, id)
    address = f"{API_PREFIX}/jobs/{id}/preview"
    return JobPreview(
        version=seen.version,
        iteration=seen.iteration,
        most=seen.most,
        loss=seen.loss if seen.loss is not None and isfinite(seen.loss) else None,
        images=[
            PreviewImage(**place._asdict(), image=f"{address}/{n}.png?version={seen.version}")  # type: ignore[typeddict-item]
            for n, place in enumerate(seen.places)
        ],
    )


@router.get("/{n}.png", response_class=Response, responses=IMAGE_RESPONSE)
def preview_image(service: Service, id: Name, n: Number, version: PreviewVersion = None) -> Response:
    """Return the image with index `n`, counted from 0, of the newest preview as PNG.

    `version` is ignored; a new value makes browsers request the image again.
    """
    seen = _read_preview(service, id)
    if n >= len(seen.images):
        raise NoImage(f"there is no image {n}: the preview has {len(seen.images)} images now, counted from 0")
    pixels, buffer = seen.images[n], io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(buffer, format="PNG")
    return Response(buffer.getvalue(), media_type=PNG_TYPE, headers={"Cache-Control": "private, max-age=60"})


def read_stamp(service: ServiceComponents, id: str) -> int:
    """Return the Unix time in ns at which a job's preview file last changed; 0 if there is none.

    It is cheaper than `read_version`, since the file is not opened.
    """
    try:
        return os.stat(previews.make_preview_path(service.settings.state_folder, id)).st_mtime_ns
    except (OSError, ValueError):
        return 0


def read_version(service: ServiceComponents, id: str) -> int | None:
    """Return `Preview.version` of a job's preview, which its image addresses hold as `version`; None if there is no preview."""
    seen = previews.read(service.settings.state_folder, id)
    return seen.version if seen else None


def _read_preview(service: ServiceComponents, id: str) -> previews.Preview:
    job = service.queue.get(id)
    seen = previews.read(service.settings.state_folder, job.id)
    if seen is None:
        raise NoImage(
            f"job {id}, which is {job.state}, has no preview: only running jobs have one, and only if their attack provides "
            "intermediate images"
        )
    return seen
