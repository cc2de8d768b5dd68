"""What to do instead of sending an object to the ranks, by its type's name, so that no library is imported."""

from __future__ import annotations

_CREATE = "create it inside {place}"
_CONNECT = "connect inside {place}"

# A name that ends with a dot stands for everything below it.
_BY_TYPE = {
    "_thread.": _CREATE,
    "threading.Thread": "start it inside {place}",
    "threading.": _CREATE,
    "multiprocessing.": _CREATE,
    "_contextvars.": _CREATE,
    "concurrent.futures.": _CREATE,
    "_asyncio.": _CREATE,
    "asyncio.": _CREATE,
    "_io.": "open it inside {place}",
    "tempfile.": "open it inside {place}",
    "_socket.": _CONNECT,
    "socket.": _CONNECT,
    "ssl.": _CONNECT,
    "sqlite3.": _CONNECT,
    "sqlalchemy.engine.": _CONNECT,
    "psycopg": _CONNECT,
    "psycopg.": _CONNECT,
    "psycopg2.": _CONNECT,
    "pymongo.": _CONNECT,
    "redis.": _CONNECT,
    "duckdb.": _CONNECT,
    "builtins.generator": "create it inside {place}, or send a list of its items",
    "builtins.coroutine": "create it inside {place} and run it there with asyncio.run",
    "builtins.async_generator": _CREATE,
    "builtins.frame": "send text instead",
    "builtins.traceback": "send traceback.format_exc() instead",
    "weakref.": "hold the object itself",
    "logging.": "call logging.getLogger(name) inside {place}",
    "loguru.": "import the logger inside {place}",
    "pyspark.": "ranks have no Spark session: write the data to files and read them inside {place}",
    "mlflow.": "call mlflow inside {place}: a rank logs to this launch's MLflow run",
    "_tkinter.": "keep the window in the notebook and send plain values",
    "tkinter.": "keep the window in the notebook and send plain values",
    "ipywidgets.": "keep the widget in the notebook and send its value",
    "air_magic.run.": "send what its result() returned",
    "torch._C._distributed_c10d.": "call torch.distributed.init_process_group inside {place}",
    "torch.utils.data.dataloader._": "send the DataLoader and iterate inside {place}",
    "torch._C.Generator": "create it inside {place} and seed it there",
}
_LABELS = {"_thread.lock": "threading.Lock", "_thread.RLock": "threading.RLock", "socket.socket": "socket.socket"}


def advice_for(obj: object, place: str) -> str | None:
    """What to do instead of sending the object; None for a type without known advice."""
    for cls in type(obj).__mro__:
        name = f"{cls.__module__}.{cls.__qualname__}"
        for key, advice in _BY_TYPE.items():
            if name == key or (key[-1] in "._" and name.startswith(key)):
                return advice.format(place=place)
    return None


def label(obj: object) -> str:
    """The object's type as a reader knows it, with its article."""
    cls = type(obj)
    if cls.__module__ == "_io" and hasattr(obj, "name"):
        return f"an open file ({obj.name!r})"
    name = f"{cls.__module__}.{cls.__qualname__}"
    name = _LABELS.get(name, cls.__qualname__ if cls.__module__ in ("builtins", "__main__") else name)
    return with_article(name, f"`{name}`")


def with_article(word: str, shown: str | None = None) -> str:
    """The word, or how it is shown, behind ``a`` or ``an``."""
    vowel = word[:1].lower() in tuple("aeiou") or word.startswith("nd")  # an ndarray
    return f"{'an' if vowel else 'a'} {shown or word}"
