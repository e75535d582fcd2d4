from tests.router.dispatched_fleet import fleet

__all__ = ["fleet"]
