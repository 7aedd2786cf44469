"""Faults injected into the real engine, as worker extensions (`EngineSettings.extension`)."""

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from molt.publish.receive import EngineExtension, ShmTransferEngine


class LeavesHeadPacked(ShmTransferEngine):
    """Receives everything, but a tied head keeps its packed copy of the old embedding."""

    def repack_tied_head(self) -> None:
        pass


WeightTransferEngineFactory.register_engine("shm_leaves_head_packed", LeavesHeadPacked)


class FaultyExtension(EngineExtension):
    """The normal extension; naming it imports this module, which registers the faulty back end."""
