"""Views of PettingZoo's classic games; tic-tac-toe has the view of `agentgym/TicTacToe-v0`.

connect_four  by turns, seven columns; +1 win, -1 loss. Success: 1 win, 0.5 draw, 0 loss.
rps           at once, 15 rounds of rock, paper, scissors; +1, -1 a round. Success: 1, 0.5, 0 by the sum.
"""
