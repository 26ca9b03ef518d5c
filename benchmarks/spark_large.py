"""``make bench-spark_large``: as ``make bench-spark``, on 10 and on 50 million rollups.

Some 40 minutes, 2 GB of temporary disk, and 8 GB of memory for the engine that has its turn.
"""

from __future__ import annotations

from benchmarks import spark

if __name__ == "__main__":
    spark.main("spark_large", (10_000_000, 50_000_000))
