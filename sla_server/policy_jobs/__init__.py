"""Scheduled Spark jobs that turn stored statistics into throttling policies (P19, SLA-MODEL.md 4).

``transforms`` are pure DataFrame -> DataFrame functions. ``model`` makes a policy of rows; the arithmetic
below it, ``capacity``, ``demand``, ``caps`` and ``cost_model``, is pure numpy. All of it is tested without
Spark. ``java_process`` ends Java with the job, ``session`` builds the session, ``job`` is the thin entry
point. DataFrame API only (no RDD, ``sparkContext`` or ``_jvm``), so that the same code runs on a cluster and
over Spark Connect. Nothing else in the product imports this package.
"""
