"""llama.cpp by its C interface: one context with a sequence for every prompt.

Its Python class continues one prompt at a time and its server adds HTTP, so batches and speculation
are driven here, by rows in one `llama_decode`, as its own examples do.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from gguf_file import cached
from look_up import look_up
from worker import Prompts, WorkerLoad, serve

CONTEXT_TOKENS = 512
Row = tuple[int, int, int, bool]
"""Token, position, sequence, whether its logits are wanted."""


class LlamaModel:
    """One model with one context."""

    def __init__(self, file: Path, batch: int, settings: dict) -> None:
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = settings.get("repack", True)
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        how = llama_cpp.llama_context_default_params()
        how.n_ctx = batch * CONTEXT_TOKENS
        how.n_batch = max(2048, batch * CONTEXT_TOKENS)
        how.n_ubatch = settings["ubatch"]
        how.n_seq_max = batch
        how.n_threads = how.n_threads_batch = 2
        how.kv_unified = settings["unified"]
        how.flash_attn_type = int(settings["flash"])
        how.no_perf = True
        self.context = llama_cpp.llama_init_from_model(self.model, how)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self.model)
        )
        self.batch = llama_cpp.llama_batch_init(how.n_batch, 0, 1)
        shape = (how.n_batch,)
        self.tokens = np.ctypeslib.as_array(self.batch.token, shape)
        self.positions = np.ctypeslib.as_array(self.batch.pos, shape)
        self.wanted = np.ctypeslib.as_array(self.batch.logits, shape)
        np.ctypeslib.as_array(self.batch.n_seq_id, shape)[:] = 1
        # One contiguous array of sequence ids; every row's pointer points into it.
        self.sequences = np.zeros(shape, np.int32)
        first = self.sequences.ctypes.data
        pointer = ctypes.POINTER(ctypes.c_int32)
        for i in range(how.n_batch):
            self.batch.seq_id[i] = ctypes.cast(first + 4 * i, pointer)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self.memory, False)

    def cut(self, sequence: int, length: int) -> None:
        """Forget the positions of `sequence` from `length` on."""
        llama_cpp.llama_memory_seq_rm(self.memory, sequence, length, -1)

    def decode(self, rows: list[Row]) -> np.ndarray:
        """Compute `rows`; the likeliest next token of those wanted, in the order of rows."""
        return self.logits(rows).argmax(axis=1)

    def logits(self, rows: list[Row]) -> np.ndarray:
        """Compute `rows`; [those wanted, vocab_size] float32, until the next call."""
        num = len(rows)
        table = np.array(rows, np.int32)
        self.tokens[:num] = table[:, 0]
        self.positions[:num] = table[:, 1]
        self.sequences[:num] = table[:, 2]
        self.wanted[:num] = table[:, 3]
        self.batch.n_tokens = num
        status = llama_cpp.llama_decode(self.context, self.batch)
        if status:
            raise RuntimeError(f"llama_decode: {status}")
        logits = llama_cpp.llama_get_logits(self.context)
        shape = (int(table[:, 3].sum()), self.vocab_size)
        return np.ctypeslib.as_array(logits, shape)


def silence() -> object:
    """No log from now on; what is returned must live as long."""
    llama_cpp.llama_backend_init()
    log = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    return log


class LlamaCpp:
    """settings: weights (f16, bf16; not for GGUF files), repack (weights into the layout of the
    processor's kernels), ubatch, unified (one KV buffer for all sequences), flash."""

    def load(self, what: WorkerLoad) -> dict[str, Any]:
        self.log = silence()

        def model(path: str) -> LlamaModel:
            file = Path(path)
            if file.suffix != ".gguf":
                file = cached(file, what.settings["weights"], Path(what.work))
            return LlamaModel(file, what.batch, what.settings)

        self.target = model(what.target)
        self.looks_up = what.is_ngram or what.chained
        alone = what.drafter is None or what.is_ngram
        self.drafter = None if alone else model(what.drafter)
        system = llama_cpp.llama_print_system_info().decode().strip()
        return {"version": llama_cpp.__version__, "system": system}

    def run(self, prompts: Prompts, new_tokens: int, draft_tokens: int) -> list[list[int]]:
        self.target.clear()
        texts = [list(p) for p in prompts]
        prefill = [
            (token, i, s, i == len(text) - 1)
            for s, text in enumerate(texts)
            for i, token in enumerate(text)
        ]
        for text, token in zip(texts, self.target.decode(prefill).tolist(), strict=True):
            text.append(token)
        ends = [len(p) + new_tokens for p in prompts]
        if draft_tokens:
            self._speculate(texts, ends, draft_tokens, prefill)
        else:
            for _ in range(new_tokens - 1):
                rows = [(text[-1], len(text) - 1, s, True) for s, text in enumerate(texts)]
                for text, token in zip(texts, self.target.decode(rows).tolist(), strict=True):
                    text.append(token)
        return [text[len(p) :] for text, p in zip(texts, prompts, strict=True)]

    def _speculate(
        self, texts: list[list[int]], ends: list[int], draft_tokens: int, prefill: list[Row]
    ) -> None:
        """Draft for all, verify all in one step, until every text has its end."""
        if self.drafter is not None:
            self.drafter.clear()
            self.drafter.decode(prefill)
        known = [len(text) - 1 for text in texts]
        while True:
            going = [s for s, text in enumerate(texts) if len(text) < ends[s]]
            if not going:
                return
            drafts = self._draft(texts, known, going, draft_tokens, ends)
            rows = [
                (token, len(texts[s]) - 1 + i, s, True)
                for s in going
                for i, token in enumerate([texts[s][-1], *drafts[s]])
            ]
            chosen = self.target.decode(rows).tolist()
            first = 0
            for s in going:
                own = chosen[first : first + len(drafts[s]) + 1]
                first += len(own)
                right = 0
                while right < len(drafts[s]) and drafts[s][right] == own[right]:
                    right += 1
                texts[s] += own[: right + 1]
                self.target.cut(s, len(texts[s]) - 1)
                if self.drafter is not None and known[s] > len(texts[s]) - 1:
                    known[s] = len(texts[s]) - 1
                    self.drafter.cut(s, known[s])

    def _draft(
        self,
        texts: list[list[int]],
        known: list[int],
        going: list[int],
        draft_tokens: int,
        ends: list[int],
    ) -> dict[int, list[int]]:
        """Draft tokens by sequence. `known`: how many tokens of each text the drafter has read."""
        wanted = {s: min(draft_tokens, ends[s] - len(texts[s]) - 1) for s in going}
        drafts: dict[int, list[int]] = {s: [] for s in going}
        if self.looks_up:
            drafts = {s: look_up(texts[s], wanted[s]) for s in going}
        asked = [s for s in going if self.drafter is not None and not drafts[s]]
        for step in range(draft_tokens):
            active = [s for s in asked if wanted[s] > step]
            if not active:
                break
            rows = []
            for s in active:
                text = texts[s] + drafts[s]
                last = len(text) - 1
                rows += [(text[i], i, s, i == last) for i in range(known[s], last + 1)]
                known[s] = last + 1
            for s, token in zip(active, self.drafter.decode(rows).tolist(), strict=True):
                drafts[s].append(token)
        return drafts


if __name__ == "__main__":
    serve(LlamaCpp())
