-- Version 6: functions and triggers that keep their plans and do less.

LOCK TABLE tasks IN SHARE ROW EXCLUSIVE MODE;
