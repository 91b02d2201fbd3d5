"""The web dashboard of `fastrt dashboard`: one more tool of a session, which serves pages about it."""
