"""The rules for access to the dashboard, without a server."""

import dataclasses

import pytest

from fastrt.dashboard.access import KEY_HEADER, Access, Request


@pytest.fixture
def rules():
    return Access(["127.0.0.1"], "http")


def proved(rules, path="/view", method="GET", **headers):
    """A request of a page that was admitted."""
    name, value = rules.cookie
    known = {"host": "127.0.0.1:8365", "cookie": f"{name}={value}", KEY_HEADER: rules.key}
    return Request(method, path, {**known, **{key.replace("_", "-"): value for key, value in headers.items()}})


def without(request, name):
    return dataclasses.replace(request, headers={key: value for key, value in request.headers.items() if key != name})


def test_code_admits_one_browser_and_is_replaced(rules):
    code = rules.code
    request = Request("GET", "/", {"host": "localhost:8365"}, code)
    assert rules.judge(request).admits
    assert rules.code != code
    assert rules.judge(request).status == 401
    assert "HttpOnly; SameSite=Strict" in rules.cookie_header


def test_code_admits_only_to_the_page(rules):
    for request in (
        Request("GET", "/view", {"host": "localhost"}, rules.code),
        Request("POST", "/", {"host": "localhost"}, rules.code),
        Request("GET", "/", {"host": "evil.test"}, rules.code),
    ):
        assert rules.judge(request).status in (401, 403)
    assert rules.judge(Request("GET", "/", {"host": "localhost"}, rules.code)).admits


def test_data_needs_cookie_and_key(rules):
    assert rules.judge(proved(rules)).status == 200
    assert rules.judge(without(proved(rules), "cookie")).status == 401
    assert rules.judge(without(proved(rules), KEY_HEADER)).status == 401
    assert rules.judge(proved(rules, **{KEY_HEADER: "x"})).status == 401
    other = Access(["127.0.0.1"], "http")
    assert rules.judge(proved(other)).status == 401
    for path in ("/", "/static/app.js"):  # a page loads these before its script can send the key
        assert rules.judge(without(proved(rules, path), KEY_HEADER)).status == 200
        assert rules.judge(without(proved(rules, path), "cookie")).status == 401


def test_token_admits_programs(rules):
    request = Request("GET", "/view", {"host": "127.0.0.1", "authorization": f"Bearer {rules.token}"})
    assert rules.judge(request).status == 200
    for given in ("Bearer x", "Basic " + rules.token, rules.token, "Bearer "):
        assert rules.judge(proved(rules, authorization=given)).status == 401


@pytest.mark.parametrize("host", ["evil.test", "evil.test:8365", "127.0.0.1.evil.test", "", "[fe80::1]:80", "10.0.0.1"])
def test_name_that_is_not_the_dashboards_is_refused(rules, host):
    assert rules.judge(proved(rules, host=host)).status == 403


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost:9000", "[::1]:9000", "LOCALHOST"])
def test_loopback_under_any_port_is_the_dashboard(rules, host):
    assert rules.judge(proved(rules, host=host)).status == 200  # as behind `ssh -L`


def test_names_of_the_certificate_are_the_dashboards():
    rules = Access(["10.0.0.1", "Node.example"], "https")
    assert rules.judge(proved(rules, host="node.example:8365")).status == 200
    assert rules.judge(proved(rules, host="10.0.0.1:8365")).status == 200
    assert rules.judge(proved(rules, host="other.example:8365")).status == 403
    assert rules.cookie_header.endswith("; Secure")


@pytest.mark.parametrize("origin", ["http://evil.test", "null", "https://127.0.0.1:8365", "http://127.0.0.1:1"])
def test_page_of_another_origin_is_refused(rules, origin):
    assert rules.judge(proved(rules, origin=origin)).status == 403


def test_own_origin_is_served(rules):
    request = proved(rules, origin="http://127.0.0.1:8365", sec_fetch_site="same-origin")
    assert rules.judge(request).status == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_other_sites_may_only_link_to_the_page(rules, site):
    assert rules.judge(proved(rules, sec_fetch_site=site, sec_fetch_mode="navigate")).status == 403
    assert rules.judge(proved(rules, "/", sec_fetch_site=site, sec_fetch_mode="no-cors")).status == 403
    assert rules.judge(proved(rules, "/", sec_fetch_site=site, sec_fetch_mode="navigate")).status == 200


def test_forms_and_actions_are_refused(rules):
    json = "application/json"
    assert rules.judge(proved(rules, "/do/record", "POST", content_type=json)).status == 200
    for kind in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x", ""):
        assert rules.judge(proved(rules, "/do/record", "POST", content_type=kind)).status == 415
    assert rules.judge(proved(rules, "/act/cancel", "POST", content_type=json)).status == 403
    allowing = Access(["127.0.0.1"], "http", allow_actions=True)
    assert allowing.judge(proved(allowing, "/act/cancel", "POST", content_type=json)).status == 200
    assert allowing.judge(proved(allowing, "/act/cancel", "PUT", content_type=json)).status == 405
