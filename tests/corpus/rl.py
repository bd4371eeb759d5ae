"""Reinforcement learning: the update steps of baselines and of keras.io's examples, on fed transitions."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tests.corpus.program import Built, Feed, Library, Program, graphed, ids, placeholders, stepped, update

v1 = tf.compat.v1
D = tf.float64
STATE, ACTIONS = 4, 3
BASELINES = "github.com/openai/baselines/tree/master/baselines/"
KERAS = "keras.io/examples/rl/"


def _net(outputs: int, inputs: int = STATE, last: str | None = None) -> Any:
    return keras.Sequential(
        [keras.Input((inputs,)), layers.Dense(8, activation="tanh"), layers.Dense(outputs, activation=last)]
    )


def _adam(model: Any) -> Any:
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)
    return optimizer


def _v1_net(x: Any, outputs: int, scope: str) -> Any:
    with v1.variable_scope(scope, reuse=v1.AUTO_REUSE):
        for name, units, act in (("h", 8, tf.tanh), ("out", outputs, tf.identity)):
            w = v1.get_variable(f"{name}/w", (x.shape[-1], units), D, v1.glorot_uniform_initializer())
            x = act(x @ w + v1.get_variable(f"{name}/b", (units,), D, v1.zeros_initializer()))
        return x


def ppo2() -> Built:
    """Clipped policy and value losses, entropy, a norm that is clipped: the graph of baselines' ppo2."""
    feeds = {
        "obs": Feed((STATE,)),
        "action": ids(ACTIONS),
        "adv": Feed(),
        "returns": Feed(),
        "old_neglogp": Feed((), "unit"),
        "old_value": Feed(),
    }
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(1)
        obs, action, adv, returns, old_neglogp, old_value = placeholders(**feeds)
        logits, value = _v1_net(obs, ACTIONS, "pi"), _v1_net(obs, 1, "vf")[:, 0]
        neglogp = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=action, logits=logits)
        shifted = logits - tf.reduce_max(logits, -1, keepdims=True)
        total = tf.reduce_sum(tf.exp(shifted), -1, keepdims=True)
        entropy = tf.reduce_mean(tf.reduce_sum(tf.exp(shifted) / total * (tf.math.log(total) - shifted), -1))
        mean, variance = tf.nn.moments(adv, [0])
        adv = (adv - mean) / (tf.sqrt(variance) + 1e-8)
        clipped = old_value + tf.clip_by_value(value - old_value, -0.2, 0.2)
        vf_loss = 0.5 * tf.reduce_mean(tf.maximum((value - returns) ** 2, (clipped - returns) ** 2))
        ratio = tf.exp(old_neglogp - neglogp)
        pg_loss = tf.reduce_mean(tf.maximum(-adv * ratio, -adv * tf.clip_by_value(ratio, 0.8, 1.2)))
        loss = pg_loss - entropy * 0.01 + vf_loss * 0.5
        params = v1.trainable_variables()
        gradients, _ = tf.clip_by_global_norm(tf.gradients(loss, params), 0.5)
        train = v1.train.AdamOptimizer(3e-4, epsilon=1e-5).apply_gradients(zip(gradients, params, strict=True))
        return graphed(graph, loss, train, **feeds)


def a2c() -> Built:
    feeds = {"obs": Feed((STATE,)), "action": ids(ACTIONS), "adv": Feed(), "returns": Feed()}
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(1)
        obs, action, adv, returns = placeholders(**feeds)
        hidden = _v1_net(obs, 8, "body")
        logits, value = _v1_net(hidden, ACTIONS, "pi"), _v1_net(hidden, 1, "vf")[:, 0]
        neglogp = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=action, logits=logits)
        p = tf.nn.softmax(logits)
        entropy = tf.reduce_mean(-tf.reduce_sum(p * tf.nn.log_softmax(logits), -1))
        loss = tf.reduce_mean(adv * neglogp) - 0.01 * entropy + 0.5 * tf.reduce_mean((value - returns) ** 2)
        params = v1.trainable_variables()
        gradients, _ = tf.clip_by_global_norm(tf.gradients(loss, params), 0.5)
        train = v1.train.RMSPropOptimizer(7e-4, 0.99, epsilon=1e-5).apply_gradients(zip(gradients, params, strict=True))
        return graphed(graph, loss, train, **feeds)


def deepq() -> Built:
    """Double Q-learning with weights of a prioritised replay; each gradient's norm is clipped by itself."""
    feeds = {
        "obs": Feed((STATE,)),
        "action": ids(ACTIONS),
        "reward": Feed(),
        "after": Feed((STATE,)),
        "done": Feed((), "binary"),
        "weight": Feed((), "unit"),
    }
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(1)
        obs, action, reward, after, done, weight = placeholders(**feeds)
        q, target, online = _v1_net(obs, ACTIONS, "q"), _v1_net(after, ACTIONS, "target"), _v1_net(after, ACTIONS, "q")
        chosen = tf.reduce_sum(q * tf.one_hot(action, ACTIONS, dtype=D), 1)
        best = tf.reduce_sum(target * tf.one_hot(tf.argmax(online, 1), ACTIONS, dtype=D), 1)
        error = chosen - tf.stop_gradient(reward + 0.99 * (1.0 - done) * best)
        huber = tf.where(tf.abs(error) < 1.0, 0.5 * error**2, tf.abs(error) - 0.5)
        loss = tf.reduce_mean(weight * huber)
        params = v1.get_collection("trainable_variables", "q/")
        optimizer = v1.train.AdamOptimizer(5e-4)
        pairs = [(tf.clip_by_norm(g, 10.0), v) for g, v in optimizer.compute_gradients(loss, params)]
        return graphed(graph, loss, optimizer.apply_gradients(pairs), **feeds)


def ddpg() -> Built:
    actor, critic = _net(2, last="tanh"), _net(1, STATE + 2)
    targets = [_net(2, last="tanh"), _net(1, STATE + 2)]
    for source, target in zip((actor, critic), targets, strict=True):
        target.set_weights(source.get_weights())
    actor_optimizer, critic_optimizer = _adam(actor), _adam(critic)

    def step(state: Any, action: Any, reward: Any, after: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            wanted = reward + 0.99 * targets[1](tf.concat([after, targets[0](after)], 1))
            critic_loss = tf.reduce_mean((wanted - critic(tf.concat([state, action], 1))) ** 2)
        update(tape, critic_loss, critic.trainable_variables, critic_optimizer)
        with tf.GradientTape() as tape:
            actor_loss = -tf.reduce_mean(critic(tf.concat([state, actor(state)], 1)))
        update(tape, actor_loss, actor.trainable_variables, actor_optimizer)
        for source, target in zip((actor, critic), targets, strict=True):
            for v, kept in zip(source.variables, target.variables, strict=True):
                kept.assign(0.005 * v + 0.995 * kept)
        return {"critic": critic_loss, "actor": actor_loss}

    return stepped(step, state=Feed((STATE,)), action=Feed((2,)), reward=Feed((1,)), after=Feed((STATE,)))


def sac() -> Built:
    """Soft actor-critic: sampled actions, two critics, a temperature that is trained."""
    actor, critics = _net(4), [_net(1, STATE + 2), _net(1, STATE + 2)]
    log_alpha = keras.Variable(0.0, dtype="float64", name="log_alpha")
    optimizers = [_adam(actor), *map(_adam, critics)]
    alpha_optimizer = keras.optimizers.Adam(1e-3)
    alpha_optimizer.build([log_alpha])

    def sampled(state: Any, seed: int) -> tuple[Any, Any]:
        mean, scale = tf.split(actor(state), 2, 1)
        scale = tf.exp(tf.clip_by_value(scale, -5.0, 2.0))
        raw = mean + scale * tf.random.normal(tf.shape(mean), dtype=mean.dtype, seed=seed)
        log_p = -0.5 * ((raw - mean) / scale) ** 2 - tf.math.log(scale) - tf.math.log(1 - tf.tanh(raw) ** 2 + 1e-6)
        return tf.tanh(raw), tf.reduce_sum(log_p, 1, keepdims=True)

    def step(state: Any, action: Any, reward: Any, after: Any) -> dict[str, Any]:
        alpha = tf.exp(tf.convert_to_tensor(log_alpha))
        following, log_p = sampled(after, 1)
        both = tf.concat([after, following], 1)
        low = tf.minimum(critics[0](both), critics[1](both))
        wanted = tf.stop_gradient(reward + 0.99 * (low - alpha * log_p))
        for critic, optimizer in zip(critics, optimizers[1:], strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((critic(tf.concat([state, action], 1)) - wanted) ** 2)
            update(tape, loss, critic.trainable_variables, optimizer)
        with tf.GradientTape() as tape:
            new, log_p = sampled(state, 2)
            both = tf.concat([state, new], 1)
            low = tf.minimum(critics[0](both), critics[1](both))
            actor_loss = tf.reduce_mean(tf.stop_gradient(alpha) * log_p - low)
        update(tape, actor_loss, actor.trainable_variables, optimizers[0])
        with tf.GradientTape() as tape:
            alpha_loss = -tf.reduce_mean(tf.convert_to_tensor(log_alpha) * tf.stop_gradient(log_p - 2.0))
        update(tape, alpha_loss, [log_alpha], alpha_optimizer)
        return {"critic": loss, "actor": actor_loss, "alpha": alpha_loss}

    return stepped(step, state=Feed((STATE,)), action=Feed((2,)), reward=Feed((1,)), after=Feed((STATE,)))


def deep_q_atari() -> Built:
    model, target = _net(ACTIONS), _net(ACTIONS)
    optimizer, huber = keras.optimizers.Adam(2.5e-4, clipnorm=1.0), keras.losses.Huber()
    optimizer.build(model.trainable_variables)

    def step(state: Any, action: Any, reward: Any, after: Any, done: Any) -> dict[str, Any]:
        updated = reward + 0.99 * tf.reduce_max(target(after), axis=1)
        updated = updated * (1 - done) - done
        with tf.GradientTape() as tape:
            q = tf.reduce_sum(model(state) * tf.one_hot(action, ACTIONS, dtype=D), axis=1)
            loss = huber(updated, q)
        update(tape, loss, model.trainable_variables, optimizer)
        return {"loss": loss}

    feeds = {"state": Feed((STATE,)), "action": ids(ACTIONS), "reward": Feed(), "after": Feed((STATE,))}
    return stepped(step, **feeds, done=Feed((), "binary"))


def reinforce() -> Built:
    """Discounted returns along each episode, normalised over the batch."""
    model = _net(ACTIONS)
    optimizer = _adam(model)

    def step(states: Any, actions: Any, rewards: Any) -> dict[str, Any]:
        returns = tf.math.cumsum(rewards, axis=1, reverse=True)
        returns = (returns - tf.reduce_mean(returns)) / (tf.math.reduce_std(returns) + 1e-8)
        with tf.GradientTape() as tape:
            logits = model(tf.reshape(states, [-1, STATE]))
            neglogp = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.reshape(actions, [-1]), logits)
            loss = tf.reduce_mean(neglogp * tf.reshape(returns, [-1]))
        update(tape, loss, model.trainable_variables, optimizer)
        return {"loss": loss}

    return stepped(step, states=Feed((5, STATE)), actions=ids(ACTIONS, 5), rewards=Feed((5,)))


PROGRAMS = (
    Program(ppo2, BASELINES + "ppo2"),
    Program(a2c, BASELINES + "a2c"),
    Program(deepq, BASELINES + "deepq"),
    Program(ddpg, KERAS + "ddpg_pendulum"),
    Program(sac, "github.com/openai/spinningup"),
    Program(deep_q_atari, KERAS + "deep_q_network_breakout"),
    Program(reinforce, "github.com/openai/spinningup"),
)
LIBRARY = Library("reinforcement_learning", PROGRAMS)
