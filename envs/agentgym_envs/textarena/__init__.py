"""The games of textarena as they are: `textarena:KuhnPoker-v0` and so on, one agent or several by turns.

Agents    player_0, player_1, ...; `num_players` for games that more can play
View      what the game has said since the agent's last answer, "[GAME] ..." and "[Player 1] ..."
Answer    as the game asks for it, mostly an action in square brackets; where textarena's default version adds
          missing brackets or cuts long texts, so does this one
Illegal   textarena's rule: the agent is told and answers again, once; then it loses (or is out of the game)
Rewards   "outcome", all at the end: what textarena gives each player (+1 win, -1 loss, 0 draw in most games)
Success   one player: the outcome, cut to 0..1; several: (outcome + 1) / 2, cut to 0..1
Metrics   "illegal" 1 for a player who ended the game, or was put out, by illegal moves

textarena draws from the process-global generators of `random` and numpy. Here each game has streams of its own, which
are put in their place while it is called; several threads at once would still mix them, so an instance gets a process.
"""
