"""LBI and Split LBI for linear models: paths as functions, estimators on top of them. Needs the extra [linear].

    from dessilbi.linear import LBICV, SplitLBI, lbi_path

    model = LBICV().fit(X, y)             # scikit-learn estimators
    path = lbi_path(X, y)                 # the whole path: times, coefs, order of entry

A leaf of the library: NumPy, SciPy and scikit-learn, no torch.
"""

try:
    import sklearn  # noqa: F401
except ImportError as error:
    raise ImportError(f"{error}: dessilbi.linear needs scikit-learn: pip install 'dessilbi[linear]'") from None

from dessilbi.linear.course import LinearPath
from dessilbi.linear.estimators import LBI, LBIClassifier, SplitLBI, SplitLBIClassifier
from dessilbi.linear.iss import IssPath, iss_path
from dessilbi.linear.lbi import lbi_path
from dessilbi.linear.split import split_lbi_path
from dessilbi.linear.stopping import LBICV, LBIClassifierCV, SplitLBIClassifierCV, SplitLBICV
from dessilbi.linear.transforms import difference

__all__ = [
    "LBI",
    "LBICV",
    "IssPath",
    "LBIClassifier",
    "LBIClassifierCV",
    "LinearPath",
    "SplitLBI",
    "SplitLBICV",
    "SplitLBIClassifier",
    "SplitLBIClassifierCV",
    "difference",
    "iss_path",
    "lbi_path",
    "split_lbi_path",
]
