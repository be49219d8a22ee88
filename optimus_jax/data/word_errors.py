"""The word error rate of texts that were written down."""

from collections.abc import Sequence

from optimus_jax.errors import DataError, explain


def check_jiwer(otherwise: str = "") -> None:
    """Raise DataError if the library that counts word errors is missing.

    Args:
      otherwise: how to do without it.
    """
    try:
        import jiwer  # noqa: F401
    except ImportError as error:
        raise DataError(
            explain(
                "word error rates need jiwer, which is not installed",
                given=error,
                do="pip install 'optimus-jax[sound]'" + otherwise,
            )
        ) from error


def has_words(text: str) -> bool:
    """Whether a text has letters or digits."""
    return any(map(str.isalnum, text))


def word_errors(references: Sequence[str], texts: Sequence[str]) -> float:
    """Word error rate: words that must be changed, left out or put in, of all words of the
    references. Words are separated by any white space; case and punctuation do not count.

    Raises DataError if jiwer is missing, or the references hold no words.
    """
    check_jiwer()
    import jiwer

    plain = jiwer.Compose(
        [
            jiwer.ToLowerCase(),
            jiwer.RemovePunctuation(),
            jiwer.RemoveMultipleSpaces(),
            jiwer.Strip(),
            jiwer.ReduceToListOfListOfWords(),
        ]
    )
    pairs = [(a, b) for a, b in zip(references, texts, strict=True) if has_words(a)]
    if not pairs:
        raise DataError(
            explain(
                "the references hold no words",
                given=f"{len(references)} texts",
                do="give recordings with their texts",
            )
        )
    # jiwer divides words at " " alone.
    reference, hypothesis = (
        [" ".join(text.split()) for text in each] for each in zip(*pairs, strict=True)
    )
    return float(
        jiwer.wer(
            reference,
            hypothesis,
            reference_transform=plain,
            hypothesis_transform=plain,
        )
    )
