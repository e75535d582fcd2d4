import io

import pytest
from PIL import Image

from loadtests.workloads import PageSize
from loadtests.workloads.pages import MOST_PAGE_BYTES, PAGE_SIZES, page_png
from replicas.protocol.images import read_size


@pytest.mark.parametrize("size", PAGE_SIZES.values())
def test_a_page_is_a_picture_of_its_size_with_something_on_it(size: PageSize) -> None:
    for number in range(20):
        content = page_png(1, f"page-{number}", size)
        assert len(content) <= MOST_PAGE_BYTES
        header = read_size(content)
        assert (header.width, header.height) == (size.width, size.height)
        with Image.open(io.BytesIO(content)) as picture:
            picture.load()
            assert picture.size == (size.width, size.height)
            histogram = picture.convert("L").histogram()
        assert 0.02 < histogram[0] / (size.width * size.height) < 0.5


def test_a_page_is_the_same_file_wherever_it_is_made_and_no_other_is() -> None:
    size, other = PageSize(640, 448), PageSize(640, 280)
    files = [
        page_png(1, "one", size),
        page_png(2, "one", size),
        page_png(1, "two", size),
        page_png(1, "one", other),
    ]
    assert len(set(files)) == 4
    assert len({len(file) for file in files}) > 1
    assert page_png(1, "one", size) == files[0]
