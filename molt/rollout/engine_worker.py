"""One vLLM engine in a Ray actor: token ids in, token ids out, with log-probs and policy versions.

`Engine` is the Protocol seam of the rollout side: everything above it runs against any class with
these methods (the tests have a fake one). vLLM carries a version as a string; here it is an integer.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import ray

from molt.chat.images import open_image
from molt.columns import TokenColumns, candidate_columns, token_columns
from molt.config import VllmConfig
from molt.errors import EngineError, StructureError
from molt.publish.proof import Receipt
from molt.types import Json, Media, Turn

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config.model import ModelDType
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import StructuredOutputsParams

CPU_KV_CACHE_BYTES = 512 << 20
VLLM_MAX_LOGPROBS = 20
"""vLLM's own limit of candidates per token, unless it is told otherwise."""


@dataclass(frozen=True)
class EngineSettings:
    """What an engine needs to know; `cluster` derives it from the run's config."""

    model: str
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    max_model_len: int
    device: str
    """`cpu` or an accelerator; on a CPU the engine is started by fork, without compilation."""
    vllm: VllmConfig = field(default_factory=VllmConfig)
    weight_transfer: str = "shm"
    partial_rollouts: bool = False
    """A weight sync interrupts running requests, which then go on under the new weights."""
    candidates: int = 0
    """The most that a request may ask for (`Sampling.candidates`)."""
    deterministic: bool = False
    """The answer to a request does not depend on the other requests."""
    extension: str = "molt.publish.receive.EngineExtension"
    """Mixed into vLLM's worker; its module registers the transfer back end."""

    @property
    def keeps_kv(self) -> bool:
        """Whether a request that a weight sync interrupts keeps the KV cache of the weights before it."""
        return self.partial_rollouts and self.vllm.partial_kv == "keep"


@dataclass(frozen=True)
class Sampling:
    """The distribution a turn is sampled from."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int
    stop_token_ids: tuple[int, ...]
    candidates: int = 0
    """How many of the likeliest tokens are recorded at each sampled one (`columns.candidate_columns`)."""
    structure: Json | None = None
    """What the turn must look like, as arguments of vLLM's `StructuredOutputsParams`; never in a trained turn."""


class Engine(Protocol):
    """What rollouts and weight syncs need of an engine.

    After `start` an engine refuses requests until `resume`. A weight sync is start, update, finish, commit, resume.
    """

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: Sampling, media: Sequence[Media] = ()
    ) -> Turn: ...
    async def complete(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> list[int]: ...
    async def logprobs(self, sequences: list[list[int]]) -> list[np.ndarray]: ...
    async def init_weight_transfer_engine(self, info: dict[str, Any]) -> None: ...
    async def start_weight_update(self) -> None: ...
    async def update_weights(self, info: dict[str, Any]) -> None: ...
    async def finish_weight_update(self, weight_version: str | None = None) -> None: ...
    async def commit(self, version: int) -> list[Receipt]: ...
    async def resume(self) -> None: ...
    async def alive(self) -> bool: ...


class VllmEngine:
    """The real `Engine`; `RolloutEngineWorker` is the Ray actor of it."""

    def __init__(self, settings: EngineSettings):
        self.settings = settings
        self.version = 0
        self.llm: Any = None
        """vLLM's `AsyncLLM`, once `start` was called."""
        self.joined = False
        """Whether it may serve: it has had the trainer's weights, or was told to serve those on disk."""
        self._open = asyncio.Event()
        """Cleared while a weight sync runs."""
        self._updating = False
        """Whether vLLM has an update open."""
        self._score_requests = 0

    async def start(self) -> None:
        """Load the model; after this the engine holds its own copy of the initial weights, version 0."""
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = _engine_arguments(self.settings)
        config = arguments.create_engine_config()
        # vLLM needs the tokenizer to enforce a structure, and to put images into a prompt; never for the text.
        config.model_config.skip_tokenizer_init = False
        if self.settings.device == "cpu":
            _start_by_fork()
        self.llm = AsyncLLM.from_vllm_config(config)
        await self.llm.collective_rpc("molt_watch_owner", args=(os.getpid(),))
        await self.llm.collective_rpc("molt_record_weights")
        await self.llm.update_weight_version("0")
        await self.llm.get_supported_tasks()  # known from now on, so `_final` need not wait for them

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: Sampling, media: Sequence[Media] = ()
    ) -> Turn:
        """Sample one turn. Cancelling the call aborts the request in the engine.

        media: the images of the prompt in order, their tokens already in `prompt_ids`.

        Raises `EngineError` when vLLM aborts the request or is dead, when the engine was restarted and waits for
        weights, or when vLLM puts other tokens in the place of an image; `StructureError` when vLLM refuses the
        structure.
        """
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        params = _sampling_params(sampling)
        if not self.joined:
            raise EngineError(f"request {request_id}: the engine was restarted and has no weights of the trainer yet")
        await self._open.wait()
        if media and self.settings.keeps_kv:
            raise EngineError(
                f"request {request_id} shows images, and vLLM reads them before it takes the salt that tells the KV of "
                "two versions apart. Use --vllm.partial_kv recompute."
            )
        prompt: dict[str, Any] = {"prompt_token_ids": prompt_ids}
        if media:
            prompt = await asyncio.to_thread(_prompt_with_images, prompt_ids, media)
        try:
            final = await self._final(prompt, params, request_id)
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineError(f"engine failed on request {request_id}: {error!r}") from error
        except (VLLMClientError, ValueError) as error:  # vLLM looks at a request before it samples
            if sampling.structure is None:
                raise
            raise _unusable(error) from error

        output = final.outputs[0]
        if output.finish_reason not in ("stop", "length"):
            raise EngineError(f"request {request_id} ended with finish_reason {output.finish_reason!r}")
        if media and list(final.prompt_token_ids) != list(prompt_ids):
            raise EngineError(
                f"vLLM made {len(final.prompt_token_ids)} tokens of a prompt with {len(media)} images that has "
                f"{len(prompt_ids)}: what is recorded would not be what was read. The runner's image processor and "
                "vLLM's must be of one model directory and one version of transformers."
            )
        versions = _versions(output.weight_versions, len(output.token_ids))
        return Turn(
            prompt_ids=np.asarray(prompt_ids, np.int32),
            sampled=_sampled(output.token_ids, versions, output.logprobs, sampling.candidates),
            finish_reason=output.finish_reason,
        )

    async def complete(self, request_id: str, prompt_ids: list[int], sampling: Sampling) -> list[int]:
        """The ids of the prompt and of one turn: a sequence for the probe."""
        turn = await self.generate(request_id, prompt_ids, sampling)
        return [*prompt_ids, *turn.token_ids.tolist()]

    async def logprobs(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """Log-probs float32 `[T]` of given tokens at temperature 1 (entry 0 is 0): the probe's engine side."""
        return list(await asyncio.gather(*(self._score(ids) for ids in sequences)))

    async def _score(self, ids: list[int]) -> np.ndarray:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # prompt_logprobs are log-softmax of the raw logits, whatever the sampling temperature.
        params = SamplingParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        self._score_requests += 1
        final = await self._final({"prompt_token_ids": ids}, params, f"score-{self._score_requests}")

        values = [0.0]
        for candidates, token in zip(final.prompt_logprobs[1:], ids[1:], strict=True):
            values.append(candidates[token].logprob)
        return np.asarray(values, np.float32)

    async def _final(self, prompt: dict[str, Any], params: Any, request_id: str) -> Any:
        """The one output of a request with `FINAL_ONLY`.

        Nothing is awaited between the gate in `generate` and vLLM's queue (that is why the prompt is one that vLLM need
        not render), so a request carries the salt of the weights it starts under.
        """
        from vllm import TokensPrompt
        from vllm.inputs.engine import tokens_input

        if "multi_modal_data" in prompt:
            request = TokensPrompt(**prompt)
        else:
            salt = str(self.version) if self.settings.keeps_kv else None
            request = tokens_input(prompt["prompt_token_ids"], cache_salt=salt)

        final = None
        async for output in self.llm.generate(request, params, request_id):
            final = output
        if final is None:
            raise EngineError(f"request {request_id} ended without an output")
        return final

    async def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def start_weight_update(self) -> None:
        """Open an update: hold new requests, let running ones finish or hold them too, and drop the caches.

        An update that was interrupted before is closed first: the new one overwrites what it left.
        """
        self._open.clear()
        mode = "keep" if self.settings.partial_rollouts else "wait"
        await self.llm.pause_generation(mode=mode, clear_cache=not self.settings.keeps_kv)
        if self._updating:
            await self.llm.finish_weight_update()
        await self.llm.start_weight_update()
        self._updating = True

    async def update_weights(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        try:
            await self.llm.update_weights(WeightTransferUpdateRequest(update_info=info))
        except BaseException:
            self._updating = False  # vLLM closes the session of an update that fails
            raise

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await self.llm.finish_weight_update(weight_version)
        self._updating = False

    async def commit(self, version: int) -> list[Receipt]:
        """Set the new version, and report what every worker received and holds. Requests stay held."""
        await self.llm.update_weight_version(str(version))
        reports = await self.llm.collective_rpc("molt_receipt")
        echoed = await self.llm.get_weight_version()
        self.version = version
        return [Receipt(echoed, received, digest) for received, digest in reports]

    async def resume(self) -> None:
        """Serve the requests that were held, and new ones."""
        await self.llm.resume_generation()
        self.joined = True
        self._open.set()

    async def alive(self) -> bool:
        """Whether it serves. Answers only if vLLM's engine core does; raises `EngineError` when that is dead."""
        from vllm.v1.engine.exceptions import EngineDeadError

        if self.llm is None:
            return False
        try:
            await self.llm.is_paused()  # goes to the core and back, between two steps
        except EngineDeadError as error:
            raise EngineError(f"its engine core is dead: {error!r}") from error
        return self.joined


def _actor(engine: type[VllmEngine]) -> Any:
    """The Ray actor class; `Any`, for Ray types neither its options nor its handles."""
    return ray.remote(max_concurrency=16384)(engine)  # pyright: ignore[reportCallIssue]


@_actor
class RolloutEngineWorker(VllmEngine):
    """A `VllmEngine` as a Ray actor."""


def _sampling_params(sampling: Sampling) -> "SamplingParams":
    """What vLLM needs to sample one turn and report its log-probs."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # these alone end a turn, whatever vLLM's tokenizer says
        logprobs=sampling.candidates,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        structured_outputs=_structured_outputs(sampling),
    )


def _structured_outputs(sampling: Sampling) -> "StructuredOutputsParams | None":
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import StructuredOutputsParams

    if sampling.structure is None:
        return None
    try:
        return StructuredOutputsParams(**sampling.structure)
    except (VLLMClientError, TypeError, ValueError) as error:
        raise _unusable(error) from error


def _unusable(error: Exception) -> StructureError:
    return StructureError(
        f"the structure that the answer is to have cannot be enforced ({str(error)[:300]}). Use a simpler schema."
    )


def _prompt_with_images(ids: list[int], media: Sequence[Media]) -> dict[str, Any]:
    """A prompt as vLLM takes it: one token for each image, which vLLM replaces by the image's tokens."""
    short: list[int] = []
    end = 0
    for each in media:
        short.extend(ids[end : each.start])
        short.append(each.token_id)
        end = each.start + each.length
    short.extend(ids[end:])
    images = [open_image(each.data) for each in media]
    return {"prompt_token_ids": short, "multi_modal_data": {"image": images}}


def _sampled(token_ids: Sequence[int], versions: np.ndarray, flat: Any, candidates: int) -> TokenColumns:
    """What vLLM sampled. flat: its `FlatLogprobs`, the sampled token and then the candidates at each position."""
    width = 1 + candidates
    logprobs = np.asarray(flat.logprobs, np.float32).reshape(len(token_ids), width)
    sampled = token_columns(token_ids=token_ids, versions=versions, logprobs=logprobs[:, 0])
    if candidates == 0:
        return sampled
    ids = np.asarray(flat.token_ids, np.int32).reshape(len(token_ids), width)
    columns = candidate_columns(candidates)
    sampled = sampled.with_column(columns.ids, ids[:, 1:])
    return sampled.with_column(columns.logprobs, logprobs[:, 1:])


def _versions(spans: "Sequence[Any]", length: int) -> np.ndarray:
    """vLLM's `(version, start, end)` spans → int32 `[T]`. Raises `EngineError` unless they cover every token."""
    versions = np.full(length, -1, np.int32)
    for span in spans:
        versions[span.start : span.end] = int(span.version)
    if (versions < 0).any():
        raise EngineError(f"vLLM's version spans {spans} leave tokens of {length} without a version")
    return versions


def _engine_arguments(settings: EngineSettings) -> "AsyncEngineArgs":
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = AsyncEngineArgs(
        model=settings.model,
        dtype=cast("ModelDType", settings.dtype),  # vLLM checks it
        max_model_len=settings.max_model_len,
        tensor_parallel_size=settings.vllm.tensor_parallel_size,
        enforce_eager=settings.vllm.enforce_eager,
        enable_prefix_caching=settings.vllm.enable_prefix_caching,
        skip_tokenizer_init=True,
        max_logprobs=max(VLLM_MAX_LOGPROBS, settings.candidates),
        generation_config="vllm",  # the model's own sampling defaults must not leak into the policy
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend=settings.weight_transfer),
        worker_extension_cls=settings.extension,
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    if settings.device == "cpu":
        _adapt_to_cpu(arguments, settings)
    else:
        arguments.gpu_memory_utilization = settings.vllm.gpu_memory_utilization
    return arguments


def _adapt_to_cpu(arguments: "AsyncEngineArgs", settings: EngineSettings) -> None:
    arguments.enforce_eager = True
    arguments.kv_cache_memory_bytes = CPU_KV_CACHE_BYTES
    # The CPU default block of 128 tokens keeps short prompts out of the prefix cache.
    arguments.block_size = 32
    # vLLM 0.32 dies when it splits the prefill of a seeded request: it rewinds a generator as only a GPU's can be.
    arguments.enable_chunked_prefill = False
    arguments.max_num_batched_tokens = max(8192, settings.max_model_len)
    if settings.vllm.tensor_parallel_size == 1:
        arguments.distributed_executor_backend = "uni"
    if settings.deterministic:
        arguments.max_num_seqs = 1  # the CPU kernels round differently for other batch sizes


def _start_by_fork() -> None:
    """Start vLLM's processes by fork: seconds instead of a minute of repeated imports.

    vLLM insists on spawn inside a Ray actor because a GPU context does not survive a fork; a CPU
    engine has none.
    """
    import vllm.utils.system_utils

    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    vllm.utils.system_utils._maybe_force_spawn = lambda: None
