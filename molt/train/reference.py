"""The frozen reference, or teacher, on one rank: log-probs of the tokens that the policy sampled. No Ray."""

from dataclasses import dataclass

from molt.batch.plan import RankPlan
from molt.config import FsdpConfig
from molt.models.build import build_frozen
from molt.parallel.mesh import Mesh
from molt.train.inference import Samples, TokenArrays, infer, logprobs_forward


@dataclass(frozen=True)
class ReferenceSettings:
    """What a reference rank needs to know; derived from the run's config by `cluster`."""

    model: str
    fsdp: FsdpConfig
    temperature: float
    """The policy's: both are compared as distributions at it."""
    max_len: int


class Reference:
    """A model without optimizer. Its methods are collective: all ranks call them."""

    def __init__(self, settings: ReferenceSettings, mesh: Mesh):
        self.settings = settings
        self.model = build_frozen(settings.model, settings.fsdp, mesh, mesh.device, settings.max_len)

    def infer(self, plan: RankPlan, samples: Samples) -> TokenArrays:
        """Log-probs of the trained tokens of a training batch."""
        forward = logprobs_forward(self.model, self.settings.temperature)
        return infer(forward, plan, samples, packed=self.settings.fsdp.packing_samples)
