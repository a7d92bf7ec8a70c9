"""What happens in an engine, told to whoever wants to know: metrics, traces.

Nothing is measured while nobody observes. ``Recorder`` is what the engine tells, ``Observer`` what listens to it;
``Metrics`` counts, ``TraceFile`` writes one file for a trace viewer. ``prometheus`` and ``otel`` need their extras.
"""

from llm_datadist.observe.events import Fallback, FallbackReason, Observer, Phase, Served, Step, Transfer
from llm_datadist.observe.metrics import Family, Histogram, Kind, Metrics, Sample
from llm_datadist.observe.recorder import Recorder, Watch
from llm_datadist.observe.trace_file import TraceFile
from llm_datadist.observe.transfer_log import TransferLog

__all__ = [
    "Fallback",
    "FallbackReason",
    "Family",
    "Histogram",
    "Kind",
    "Metrics",
    "Observer",
    "Phase",
    "Recorder",
    "Sample",
    "Served",
    "Step",
    "TraceFile",
    "Transfer",
    "TransferLog",
    "Watch",
]
