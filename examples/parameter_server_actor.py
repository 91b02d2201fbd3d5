"""Actor and critic learned by several players at once, in the manner of A3C, with the parameters in an actor.

Run: python examples/parameter_server_actor.py [--engine fastrt|local|ray|ray-itself] [--size N]

Players walk a corridor with a pit at one end and a prize at the other. Each plays some games with the parameters that
it got last, computes better preferences and the value of each place, and sends that change to the server, which
answers with newer parameters; no player waits for another. How the changes mix depends on timing, so the check is of
the behaviour: the learned policy walks straight to the prize from everywhere.
"""

import numpy as np
from engines import run

PLACES, START, MOVES_MAX = 9, 3, 60
PLAYERS = 3
RATE, DISCOUNT, CURIOSITY = 0.4, 0.95, 0.02
GAMES = 4  # between two changes


class Server:
    """The parameters: preferences for left and right by place, and the value of each place."""

    def __init__(self):
        self.parameters = {"policy": np.zeros((PLACES, 2)), "value": np.zeros(PLACES)}
        self.changes = 0

    def change(self, changes):
        for name, change in changes.items():
            self.parameters[name] = self.parameters[name] + RATE * change
        self.changes += 1
        return self.parameters

    def get(self):
        return self.parameters, self.changes


def chances(preferences):
    likely = np.exp(preferences - preferences.max())
    return likely / likely.sum()


def play(random, policy):
    """One game: [(place, move, reward)], beginning somewhere on the way."""
    place, steps = int(random.integers(1, PLACES - 1)), []
    for _ in range(MOVES_MAX):
        move = int(random.random() < chances(policy[place])[1])
        after = place + (1 if move else -1)
        reward = 1.0 if after == PLACES - 1 else -1.0 if after == 0 else -0.01
        steps.append((place, move, reward))
        if after in (0, PLACES - 1):
            break
        place = after
    return steps


class Player:
    """Plays with the parameters that it got last."""

    def __init__(self, number):
        self.random = np.random.default_rng(number)

    def round(self, parameters):
        """Play some games; returns the change of the parameters."""
        policy, value = parameters["policy"], parameters["value"]
        changes = {"policy": np.zeros_like(policy), "value": np.zeros_like(value)}
        for _ in range(GAMES):
            gain = 0.0
            for place, move, reward in reversed(play(self.random, policy)):
                gain = reward + DISCOUNT * gain
                surprise = gain - value[place]
                likely = chances(policy[place])
                towards = np.eye(2)[move] - likely
                mixed = -likely * (np.log(likely) + 1 - np.sum(likely * (np.log(likely) + 1)))
                changes["policy"][place] += (surprise * towards + CURIOSITY * mixed) / GAMES
                changes["value"][place] += 0.5 * surprise / GAMES
        return changes


def main(ray, size):
    """The number of changes, and the direction of the learned policy from each place.

    Args:
        ray: the module: fastrt or Ray.
        size: tens of changes, of all players together.
    """
    server = ray.remote(Server).remote()
    players = [ray.remote(Player).remote(number) for number in range(PLAYERS)]
    first, _ = ray.get(server.get.remote())
    # A player's result is the server's argument and the server's answer the player's: both go past the driver.
    playing = {server.change.remote(player.round.remote(first)): player for player in players}
    left = 10 * size - len(players)
    while playing:
        (newer,), _ = ray.wait(list(playing), num_returns=1)
        player = playing.pop(newer)
        if left > 0:
            playing[server.change.remote(player.round.remote(newer))] = player
            left -= 1
    parameters, changes = ray.get(server.get.remote())
    return [changes, *(int(preferences.argmax()) for preferences in parameters["policy"][1:-1])]


def check(result, size):
    """The prize is to the right of every place."""
    assert result == [10 * size] + [1] * (PLACES - 2)


if __name__ == "__main__":
    run(main, check, size=60)
