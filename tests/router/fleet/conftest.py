from tests.router.dispatched_fleet import fleet
from tests.router.mirrored_index import writer
from tests.router.watched_fleet import registry, start, world

__all__ = ["fleet", "registry", "start", "world", "writer"]
