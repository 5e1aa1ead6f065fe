"""The environments of other libraries, each under the prefix that is its module's name here.

`SOURCE` in a module tells the registry which names there are; `make` builds one of them as text.
"""
