"""The data of a run, by its options: windows of a text, packed documents, or conversations."""

import datetime
from typing import Any

from shared_specs.app.data.batches import Data, Documents, Rows, with_targets
from shared_specs.app.data.packing import Piece, pack
from shared_specs.app.data.text import check_vocabulary, make_windows, read_documents
from shared_specs.app.models.weights import ModelFiles
from shared_specs.app.options import FinetuneOptions, InputError


def make_data(options: FinetuneOptions, files: ModelFiles, config: dict[str, Any], today: datetime.date) -> Data:
    """Return what the options train on, read and tokenized.

    Args:
        files: whose tokenizer and chat template are used. config: of the model. today: the date that a chat template is told.

    Raises:
        InputError: a file cannot be used, or it is too short.
    """
    if options.chat is not None:
        return _conversations(options, options.chat, files, config["vocab_size"], today)
    if options.pack:
        return _packed(options, files, config)
    return make_windows(options.text, files.tokenizer, config["vocab_size"], options.tokens, options.seed)


def _packed(options: FinetuneOptions, files: ModelFiles, config: dict[str, Any]) -> Rows:
    """Documents, each ended by the model's end of text where it has one, whole where they fit and else cut."""
    texts = read_documents(options.text)
    end = config.get("eos_token_id")
    end = [] if end is None else [end[0] if isinstance(end, list) else end]
    encoded = files.tokenizer.backend.encode_batch(texts, add_special_tokens=False)
    documents = Documents.of([[*each.ids, *end] for each in encoded])
    rows = with_targets(documents, pack(documents.lengths, options.tokens, cut=True))
    name = "the default text" if options.text is None else options.text
    if not rows:
        raise InputError(
            f"finetune: --text must have at least {options.tokens} tokens for --tokens {options.tokens} with --pack, "
            f"got {len(documents.ids)} in {name}. Pass a longer text or a smaller --tokens."
        )
    check_vocabulary(documents.ids, config["vocab_size"])
    cuts = sum(len(row) for row in rows) - len({piece.document for row in rows for piece in row})
    told = f"text of {len(documents.ids)} tokens in {len(texts)} documents, packed into {len(rows)} sequences by {cuts} cuts"
    return Rows(documents=documents, rows=rows, tokens=options.tokens, seed=options.seed, packed=True, told=told)


def _conversations(
    options: FinetuneOptions, path: str, files: ModelFiles, vocabulary: int, today: datetime.date
) -> Rows:
    """Conversations, never cut to fill a row: one that is longer than a row ends with it."""
    from shared_specs.app.data.chat import read_chat, tokenized  # which need jinja2
    from shared_specs.app.models.chat_template import chat_template

    read = read_chat(path)
    template = chat_template(files.tokenizer, files.source, today)
    said = [
        tokenized(conversation, files.tokenizer, template, f"--chat {path}: conversation {number}")
        for number, conversation in enumerate(read, 1)
    ]
    longer = sum(len(one.ids) > options.tokens for one in said)
    documents = Documents.of(
        *zip(*((one.ids[: options.tokens], one.said[: options.tokens]) for one in said), strict=True)
    )
    whole = with_targets(documents, [[Piece(number, 0, length)] for number, length in enumerate(documents.lengths)])
    if not whole:
        raise InputError(
            f"finetune: --tokens must be greater, got {options.tokens}: every conversation of --chat {path} is longer, and its "
            "first tokens have none of the assistant's."
        )
    check_vocabulary(documents.ids, vocabulary)
    kept = [piece for (piece,) in whole]
    lengths = [piece.stop for piece in kept]
    rows = whole
    if options.pack:
        rows = [[kept[piece.document] for piece in row] for row in pack(lengths, options.tokens, cut=False)]
    answers = int(documents.wanted.sum())
    told = f"chat of {len(kept)} conversations, {sum(lengths)} tokens of which {answers} are the assistant's"
    told += f", packed into {len(rows)} sequences" * options.pack
    told += f"; {longer} longer than --tokens are cut" * (longer > 0)
    told += f"; {len(said) - len(kept)} of them left out, whose assistant comes later" * (len(said) > len(kept))
    return Rows(
        documents=documents, rows=rows, tokens=options.tokens, seed=options.seed, packed=options.pack, told=told
    )
