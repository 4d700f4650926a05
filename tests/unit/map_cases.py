"""A report of `kvx verify` in which everything occurs that a picture shows."""

from __future__ import annotations

from typing import Any

LEDGER = [
    {"consumer": "weights", "bytes": 300 << 20},
    {"consumer": "KV cache: 900 blocks", "bytes": 900 << 20},
    {"consumer": "margin", "bytes": 24 << 20},
]


def status() -> dict[str, Any]:
    """30 equal segments and one wider one; 900 of 1,000 blocks, 50 of them held."""
    stride = 4096
    segments = [[index * 1000 * stride, stride] for index in range(30)] + [[30 * 1000 * stride, 2 * stride]]
    return {
        "held": {"blocks": 50},
        "cache": {
            "blocks_at_warmup": 40,
            "blocks_final": 900,
            "capacity_blocks": 1000,
            "reserved_bytes": 32 * 1000 * stride,
            "committed_bytes": 32 * 901 * stride,
            "registered_bytes": 32 * 900 * stride,
            "granularity_bytes": 10 * stride,
            "segments": segments,
            "ledger": LEDGER,
            "timeline": [
                ["open", 115.0, 1.0],
                ["reserve", 100.0, 0.001],
                ["commit", 100.5, 0.5],
                ["extend", 114.0, 0.25],
            ],
        },
    }


def answer(tokens: list[int], error: str = "") -> dict[str, Any]:
    return {"tokens": tokens, "text": "She has <b>5</b> apples & pears.", "error": error}


def report() -> dict[str, Any]:
    """Question 1 differs at token 20, 2 has no answer, 3 is cut short after 9; 0 and 12 are identical."""
    tokens = list(range(1000, 1060))
    other = [*tokens[:20], 77, *tokens[21:]]
    sides = [(tokens, tokens), (tokens, other), (tokens, []), (tokens, tokens[:9])] + [(tokens, tokens)] * 9
    answers = [
        {
            "question": f"<script>alert({n})</script>?",
            "baseline": answer(a),
            "candidate": answer(b, "500" if not b else ""),
        }
        for n, (a, b) in enumerate(sides)
    ]
    mismatches = [
        {"request": f"cmpl-question-{index}-0-ab12", "layer_group": "group0", "position": position}
        for index, position in ((1, 131), (11, 5))
    ]
    return {
        "settings": {"block_size_tokens": 16},
        "engines": {"prefill": status(), "decode": status()},
        "digests": {"mismatches": mismatches},
        "answers": answers,
    }
