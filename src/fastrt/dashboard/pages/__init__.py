"""The pages: functions (session, store, arguments of the address) that return sections. They only read."""
