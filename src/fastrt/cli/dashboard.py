"""`fastrt dashboard`: pages about the sessions on this machine, for a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fastrt.cli.look import runtime_folder

_PORT = 8365
_file = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(short_help="Show running programs in a browser.")
@click.option("--session", default="", help="Only sessions whose names begin with this; see fastrt status.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen; beyond loopback only with TLS.")
@click.option("--port", type=click.IntRange(0, 65535), help=f"Default: {_PORT}, or any free one if that is taken.")
@click.option("--tls-cert", type=_file, help="PEM file: this server's certificate chain.")
@click.option("--tls-key", type=_file, help="PEM file: its private key.")
@click.option("--allow-actions", is_flag=True, help="Let the page cancel tasks and kill actors.")
@click.option("--coordinator", default="", metavar="HOST:PORT", help="Show this coordinator for JAX, too.")
@click.option("--coordinator-ca", type=_file, help="PEM file: signs the coordinator's certificate.")
@click.option("--coordinator-cert", type=_file, help="PEM file: the certificate to show to the coordinator.")
@click.option("--coordinator-key", type=_file, help="PEM file: its private key.")
@click.option("--servers", default="", metavar="HOST:PORT", help="Show the parameter servers with this HTTP address.")
@click.option("--servers-token", type=_file, help="The file with their token.")
@click.option("--open", "open_browser", is_flag=True, help="Open the page in a browser of this machine.")
def dashboard(session: str, open_browser: bool, **given: Any) -> None:
    """Serve pages about the sessions of this user on this machine, until Ctrl-C.

    It can be started and stopped at any time beside running programs, which it does not change. The address that is
    printed holds a code that lets one browser in; then the next address is printed.
    \f
    Raises:
        click.ClickException: packages are missing, or the address cannot be used.
    """
    try:
        from fastrt.dashboard.serve import Server
    except ModuleNotFoundError as exc:
        if exc.name not in ("starlette", "uvicorn", "h11"):
            raise
        raise click.ClickException(
            "the dashboard needs packages that are not installed; run: pip install 'fastrt[dashboard]'"
        ) from exc
    from fastrt.dashboard.access import Access
    from fastrt.dashboard.desk import Desk
    from fastrt.dashboard.serve import listen, names_in
    from fastrt.dashboard.services import Addresses
    from fastrt.errors import FastrtError
    from fastrt.net.address import check_bind, join_address
    from fastrt.runtime.dashboards import this_process

    if (given["coordinator_cert"] is None) != (given["coordinator_key"] is None):
        raise click.UsageError("--coordinator-cert and --coordinator-key go together.")
    files = (given["coordinator_ca"], given["coordinator_cert"], given["coordinator_key"])
    beside = Addresses(given["coordinator"], files, given["servers"], given["servers_token"])
    tls = _tls(given["tls_cert"], given["tls_key"])
    folder = runtime_folder()
    try:
        host = given["host"]
        port = _PORT if given["port"] is None else given["port"]
        check_bind(
            join_address(host, port), authenticated=True, encrypted=tls is not None,
            encryption="Give --tls-cert and --tls-key",
        )  # fmt: skip
        names = [host.strip("[]"), *(names_in(tls[0]) if tls is not None else [])]
        sock = listen(host.strip("[]"), port, others=given["port"] is None)
    except FastrtError as exc:
        raise click.ClickException(str(exc)) from exc
    scheme = "http" if tls is None else "https"
    rules = Access(names, scheme, given["allow_actions"])
    address = f"{scheme}://{join_address(host, sock.getsockname()[1])}"
    file = this_process(address, rules.code, rules.token, session)

    def announce(words: str = "for another browser: ") -> None:
        nonlocal file
        file = this_process(address, rules.code, rules.token, session)
        file.write(folder)
        click.echo(f"{words}{file.url}")

    def started() -> None:
        announce("dashboard: ")
        if open_browser:
            click.launch(file.url)

    try:
        desk = Desk(folder, session, given["allow_actions"], beside)
        Server(sock, desk, rules, tls, started, announce).run_to_the_end()
    finally:
        file.remove(folder)
        sock.close()


def _tls(certificate: Path | None, key: Path | None) -> tuple[Path, Path] | None:
    if (certificate is None) != (key is None):
        raise click.UsageError("--tls-cert and --tls-key go together.")
    if certificate is None or key is None:
        return None
    from fastrt.errors import ConfigError
    from fastrt.net.grpc.auth import TlsFiles

    try:
        TlsFiles(certificate, key).check()
    except ConfigError as exc:
        raise click.ClickException(str(exc)) from exc
    return certificate, key
