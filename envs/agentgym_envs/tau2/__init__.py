"""tau2-bench: `tau2:retail`, `tau2:airline`, `tau2:telecom` and the small `tau2:mock`, with tau2's own data.

Agents    "user", the customer, speaks first; "agent", the company's, has the domain's tools. In telecom the user has
          tools as well, for the phone. Who calls tools gets the results and keeps the move until it says something.
          Text beside a tool call reaches nobody and does not count.
Task      one of the split's tasks (`split`: "base" all, "train", "test"), by the seed;
          `task_id` names one, or several to choose from
Prompts   agent: the domain's policy document; user: tau2's guidelines for user simulators and the task's scenario.
          Both are long. `policy` puts a text of your own in the document's place, `tools` names the tools that the
          agent is given: an easier task with shorter prompts, and not the benchmark any more.
Ends      when the user says ###STOP###, ###TRANSFER### or ###OUT-OF-SCOPE###, or after `max_errors` failed calls or
          empty messages of the two together
Rewards   "success" for the agent at the end, 0 or 1: the product of what the task demands of these (as metrics, too):
          "db" the databases are as the gold actions leave them, "env_assertion" the task's assertions about the world,
          "action" all gold actions were called, "communicate" all demanded facts were said. 0 after too many errors.
Info      the first info of each agent has "gold", for scripted policies: the gold actions and the facts to say

`replay` plays the gold actions in either seat, `noisy` leaves out some, `customer` is a user who is not in a hurry.
Not here: tasks that begin inside of a conversation (two of mock's nine). In telecom `refuel_data` gives bills a
random number, so an episode in which it is called is determined by its seed up to that number.
"""

from loguru import logger

logger.disable("tau2")  # it would write every tool call to stderr
