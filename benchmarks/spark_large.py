"""``make bench-spark_large``: as ``make bench-spark``, on 10 and on 50 million rollups.

An hour or two, 10 GB of temporary disk (``TMPDIR`` says where), and up to 12 GB of memory for the engine that
has its turn. Each size is stored when it has ended; ``ARGS="--rows 10000000"`` measures one of them alone.
"""

from __future__ import annotations

from benchmarks import spark

if __name__ == "__main__":
    spark.main("spark_large", (10_000_000, 50_000_000))
