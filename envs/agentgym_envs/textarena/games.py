"""textarena 0.7.4's games that run on Python 3.11 without a network, by the fewest who can play them.

Of its 238 ids (variants `-train` and `-raw`, which differ in wrappers only, left out) the others need NLTK's corpora, a
newer Python, an API key or data files that the package lacks, or fail or hang after a few moves.
"""

_GAMES = {
    1: """
        2048-v0-ultra-easy 2048-v0-mega-easy 2048-v0-super-easy 2048-v0-very-easy 2048-v0-easy 2048-v0
        2048-v0-hard 2048-v0-very-hard 2048-v0-extreme 2048-v0-3x3 2048-v0-5x5 2048-v0-6x6 2048-v0-8x8
        2048-v0-10x10 Bandit-v0 Bandit-v0-hard Blackjack-v0 Blackjack-v0-long Countdown-v0 Crosswords-v0
        Crosswords-v0-hardcore Cryptarithm-v0 FifteenPuzzle-v0 FrozenLake-v0 FrozenLake-v0-random
        FrozenLake-v0-hardcore GuessTheNumber-v0 GuessTheNumber-v0-hardcore LightsOut-v0 LogicPuzzle-v0
        LogicPuzzle-v0-hard Mastermind-v0 Mastermind-v0-hard Mastermind-v0-extreme Minesweeper-v0
        Minesweeper-v0-small Minesweeper-v0-medium Minesweeper-v0-hard PegJump-v0 RushHour-v0 Secretary-v0
        Secretary-v0-long Set-v0 Slitherlink-v0 Sokoban-v0 Sokoban-v0-medium Sudoku-v0-very-easy Sudoku-v0-easy
        Sudoku-v0 Sudoku-v0-medium Sudoku-v0-hard ThreeCardMonte-v0 TowerOfHanoi-v0 TowerOfHanoi-v0-medium
        TowerOfHanoi-v0-hard TowerOfHanoi-v0-hardcore TowerOfHanoi-v0-extreme
    """,
    2: """
        Alquerque-v0 Battleship-v0 Battleship-v0-standard Battleship-v0-large Battleship-v0-extreme
        Breakthrough-v0-tiny Breakthrough-v0-small Breakthrough-v0 Breakthrough-v0-large Breakthrough-v0-blind
        Breakthrough-v0-long Briscola-v0 Chopsticks-v0 Chopsticks-v0-medium Chopsticks-v0-long
        ColonelBlotto-v0-small ColonelBlotto-v0 ColonelBlotto-v0-large ColonelBlotto-v0-extreme ConnectFour-v0
        ConnectFour-v0-blind ConnectFour-v0-large Crusade-v0 GameOfPureStrategy-v0 GermanWhist-v0 Golf-v0
        Golf-v0-medium HighSociety-v0 IndianPoker-v0-short IndianPoker-v0 IndianPoker-v0-medium
        IndianPoker-v0-long IndianPoker-v0-extreme IteratedMatchingPennies-v0 IteratedPrisonersDilemma-v0
        IteratedRockPaperScissors-v0 IteratedTwoThirdsAverage-v0 KuhnPoker-v0 KuhnPoker-v0-short
        KuhnPoker-v0-medium KuhnPoker-v0-long KuhnPoker-v0-extreme LinesOfAction-v0 MemoryGame-v0
        MemoryGame-v0-medium MemoryGame-v0-hard Nim-v0 Nim-v0-medium Nim-v0-large Othello-v0-tiny
        Othello-v0-small Othello-v0 Othello-v0-big Othello-v0-huge Othello-v0-hard PigDice-v0 PigDice-v0-short
        PigDice-v0-long PigDice-v0-50 PigDice-v0-100 PigDice-v0-150 PigDice-v0-200 PigDice-v0-250 PigDice-v0-300
        PigDice-v0-350 PigDice-v0-400 PigDice-v0-450 PigDice-v0-500 QuantumTicTacToe-v0
        SimpleBlindAuction-v0-quick SimpleBlindAuction-v0 SimpleBlindAuction-v0-rich SimpleNegotiation-v0-short
        SimpleNegotiation-v0 SimpleNegotiation-v0-long SimpleTak-v0 SimpleTak-v0-medium SimpleTak-v0-large
        SimpleTak-v0-extreme SpiteAndMalice-v0 Stratego-v0 Tak-v0 Tak-v0-medium Tak-v0-hard TicTacToe-v0
        TruthAndDeception-v0 TruthAndDeception-v0-long TruthAndDeception-v0-extreme TwoDollar-v0
        UltimateTicTacToe-v0 IteratedUltimatumGame-v0 IteratedUltimatumGame-v0-alternate WildTicTacToe-v0
        Snake-v0 Snake-v0-standard Snake-v0-large Surround-v0 Surround-v0-standard Surround-v0-large
        LiarsDice-v0-small LiarsDice-v0 LiarsDice-v0-large Poker-v0-small Poker-v0 Poker-v0-long Poker-v0-extreme
        SantoriniBaseFixed-v0 NewRecruit-v0
    """,
    3: """
        ThreePlayerTicTacToe-v0 ThreePlayerGOPS-v0 ThreePlayerIPD-v0
    """,
    4: """
        Taboo-v0 Taboo-v0-animals Taboo-v0-cars Taboo-v0-city/country Taboo-v0-food Taboo-v0-literature
        Taboo-v0-people Taboo-v0-tv Taboo-v0-long Taboo-v0-full SettlersOfCatan-v0
    """,
    6: """
        SecretMafia-v0
    """,
}

PLAYERS = {name: players for players, names in _GAMES.items() for name in names.split()}
"""By id: how many play, where nothing else is asked for."""
