"""Why a prompt was, or was not, read from cache: found by one piece of code, told in many places."""
