"""Which installed packages are outside the versions that dlm_lens declares."""

import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

logger = logging.getLogger(__name__)


def declared() -> list[Requirement]:
    """The packages that dlm_lens needs, without its extras; none where it is a copy that is not installed."""
    try:
        found = [Requirement(line) for line in requires("dlm-lens") or ()]
    except PackageNotFoundError:
        return []
    return [requirement for requirement in found if requirement.marker is None]


def installed(requirement: Requirement) -> tuple[str | None, bool]:
    """The installed version of a package, None if it is missing, and whether it is one of the declared ones."""
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return None, False
    return found, requirement.specifier.contains(found, prereleases=True)


@cache
def warn_of_version(name: str) -> None:
    """Log one warning per process where an installed package is outside the declared versions.

    pip installs such a version where another package asks for it, or on request, and says so once.

    Args:
        name: of the package, as in pyproject.toml.
    """
    for requirement in declared():
        if requirement.name == name:
            found, good = installed(requirement)
            if found is not None and not good:
                logger.warning(
                    "%s %s is installed, but dlm_lens needs %s%s: numbers may be wrong "
                    "(dlm-lens doctor lists all packages)",
                    name,
                    found,
                    name,
                    requirement.specifier,
                )
