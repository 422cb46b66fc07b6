"""The examples at the end of each command's help."""

from __future__ import annotations

EXAMPLES = {
    "run": (
        'draftproof run demo -p "Once upon a time"',
        'draftproof run Qwen/Qwen2.5-0.5B-Instruct --chat -p "Why is the sky blue?" --compare',
        "draftproof run model.gguf --prompts prompts.jsonl --out answers.jsonl",
    ),
    "chat": (
        'draftproof chat Qwen/Qwen2.5-0.5B-Instruct --system "Answer in one sentence."',
    ),
    "serve": (
        "draftproof serve model.gguf --port 8000",
        "draftproof serve FOLDER --host 0.0.0.0 --api-keys keys.txt --max-batch 16",
    ),
    "demo": ("draftproof demo",),
    "plan": ("draftproof plan FOLDER --prompts prompts.jsonl --json plan.json",),
    "bench": (
        "draftproof bench demo",
        "draftproof bench FOLDER --drafter portfolio --drafter suffix --batch 1,8",
    ),
    "train": (
        "draftproof train medusa FOLDER --data texts.jsonl --self-generate --out heads",
    ),
    "doctor": ("draftproof doctor", "draftproof doctor FOLDER --dtype bfloat16"),
    "prove": (
        "draftproof prove --quick",
        "draftproof prove FOLDER --section bits --html certificate.html",
    ),
    "audit": (
        "draftproof audit --hf FOLDER --assistant-model SMALL",
        "draftproof audit --endpoint http://127.0.0.1:8000 --reference FOLDER",
    ),
}
"""By command."""


def epilog(command: str) -> str:
    """The examples of a command, for the end of its help."""
    heading = "[bold]Example[/bold]" if len(EXAMPLES[command]) == 1 else "[bold]Examples[/bold]"
    return "\n\n".join((heading, *EXAMPLES[command]))
