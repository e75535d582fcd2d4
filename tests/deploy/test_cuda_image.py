"""The CUDA image, built but for its packages.

These are some gigabytes, so they are only resolved, with their dependencies, by the same command in the same
stage: are the pins to be had for the image's Python, do they suit each other, is nothing missing? All else is
as it is.
"""

import pytest

from tests.deploy.dockerfile import ROOT
from tests.deploy.images import Image, ImageStore

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.images, pytest.mark.timeout(900)]

INSTALL = "/tmp/tools/bin/uv pip install --no-cache --no-deps --require-hashes"


@pytest.fixture(scope="module")
def cuda_image(images: ImageStore, tmp_path_factory: pytest.TempPathFactory) -> Image:
    text = (ROOT / "deploy/images/replica-cuda.Dockerfile").read_text(encoding="utf-8")
    assert text.count(INSTALL) == 1
    file = tmp_path_factory.mktemp("cuda") / "Dockerfile"
    file.write_text(text.replace(INSTALL, INSTALL.replace("--no-deps", "--dry-run")), "utf-8")
    return images.build("replica-cuda", dockerfile=file)


def test_its_packages_fit_together_and_the_rest_of_it_builds(cuda_image: Image) -> None:
    assert cuda_image.config["Entrypoint"] == ["python", "-m", "replicas"]
    assert cuda_image.config["User"] == "10001:10001"


def test_it_has_what_triton_and_probes_call(cuda_image: Image) -> None:
    with cuda_image.container() as container:
        for program in ("gcc", "wget", "kvasir"):
            assert container.run("which", program).returncode == 0, program
