"""Parts of a router whose workers compute nothing."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import models

from headrace.config import RouterSettings, RpcSettings
from headrace.directory.records import Role, WorkerLoad, WorkerRecord
from headrace.directory.view import DirectoryView
from headrace.model_config import ModelConfig, ModelFiles
from headrace.tokenizer import Tokenizer
from headrace.tokenizer.vocabulary import Vocabulary
from router.breakers import Breakers, HealthProbe
from router.dispatch import Dispatcher
from router.policy import load_policy
from router.requests import ServedModel
from router.sessions import Sessions

BLOCK_SIZE_TOKENS = 32


def bench_model() -> ServedModel:
    """A model by name, and a tokenizer whose tokens are bytes."""
    config = ModelConfig(
        architecture="llama",
        num_layers=1,
        hidden_size=1,
        intermediate_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=1 << 15,
        max_model_tokens=1 << 17,
        rope_theta=1.0,
        rms_norm_eps=1.0,
        tie_word_embeddings=True,
    )
    files = ModelFiles("bench", Path(), "safetensors", config, "bench", "bench", frozenset())
    vocabulary = Vocabulary(
        backend=tokenizers.Tokenizer(models.BPE()),
        token_bytes=[bytes([byte]) for byte in range(256)],
        bos_id=None,
        eos_id=None,
        adds_bos=False,
        strips_leading_space=False,
        chat_template=None,
    )
    return ServedModel("bench", files, Tokenizer(vocabulary), config.max_model_tokens)


def bench_record(worker_id: str, role: Role, address: str) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        role=role,
        address=address,
        incarnation=f"of {worker_id}",
        model_name="bench",
        model_fingerprint="bench",
        tokenizer_fingerprint="bench",
        kv_dtype="bfloat16",
        block_size_tokens=BLOCK_SIZE_TOKENS,
        num_blocks=1 << 20,
        max_model_tokens=1 << 17,
        vocab_size=1 << 15,
        transport="local",
        draining=False,
        load=WorkerLoad(running=0, waiting=0, waiting_tokens=0, free_blocks=1 << 20, cached_blocks=0),
    )


def make_dispatcher(view: DirectoryView, rpc: RpcSettings, model: ServedModel) -> tuple[Sessions, Dispatcher]:
    """As a router makes them, with default settings."""
    settings = RouterSettings()
    sessions = Sessions(rpc, view.mark_gone, settings.max_unread_tokens)
    breakers = Breakers(HealthProbe(view, rpc))
    return sessions, Dispatcher(view, sessions, breakers, load_policy(settings.policy), model, settings)
