#!/bin/bash
# Kills a MariaDB server that uses libaio under the preload KILLS times while it writes rows. Afterwards every row whose
# insert was acknowledged exists, and the table is intact.
#
#   mariadb.sh LIBRARY DIRECTORY KILLS
#
# The server listens only on a socket in DIRECTORY, whose contents are deleted first.
set -u
library=$1 directory=$2 kills=$3
rm -rf "$directory" && mkdir "$directory" && cd "$directory" || exit 1
user=()
[ "$(id -u)" != 0 ] || { user=(--user=nobody) && chmod 755 .. && chown nobody "$directory"; }
common=(--no-defaults "${user[@]}" --datadir="$directory/data" --skip-networking --innodb-log-file-size=8M)
sql() { mariadb --no-defaults -N -S "$directory/socket" "$@"; }

mkdir data && { [ "$(id -u)" != 0 ] || chown nobody data; }
{
  printf 'create database mysql;\nuse mysql;\n'
  cat /usr/share/mysql/mysql_system_tables.sql /usr/share/mysql/mysql_system_tables_data.sql
} | mariadbd "${common[@]}" --bootstrap >bootstrap.log 2>&1 || { tail bootstrap.log; exit 1; }

serve() {
  LD_PRELOAD=$library SPILLWAY_LOG=warn mariadbd "${common[@]}" --socket="$directory/socket" --skip-grant-tables \
    --innodb-linux-aio=aio --innodb-flush-method=O_DIRECT >server.log 2>&1 &
  server=$!
  for _ in $(seq 300); do
    sql -e 'select 1' >/dev/null 2>&1 && return 0
    kill -0 $server 2>/dev/null || break
    sleep 0.1
  done
  tail server.log
  return 1
}
# Inserts rows one by one, and records each acknowledged one.
insert() {
  local row=$1
  while sql -e "insert into t.rows values($row, repeat(char(97 + $row % 26), 400))" 2>/dev/null; do
    echo $((row++)) >>acknowledged
  done
}

serve || exit 1
grep -q "Using Linux native AIO" server.log || { echo "the server does not use libaio"; exit 1; }
grep -q "forwarding to libaio.so.1: the program submits" server.log || { echo "the preload was not asked"; exit 1; }
sql -e 'create database t; create table t.rows(i int primary key, b varchar(500)) engine=innodb' || exit 1
touch acknowledged
next=0
for kill in $(seq "$kills"); do
  insert $next &
  writer=$!
  sleep "0.$((3 + kill % 5))"
  kill -9 $server
  wait $server $writer 2>/dev/null
  serve || exit 1
  lost=$(comm -23 <(sort acknowledged) <(sql -e 'select i from t.rows' | sort) | wc -l)
  wrong=$(sql -e 'select count(*) from t.rows where b != repeat(char(97 + i % 26), 400)')
  whole=$(sql -e 'check table t.rows' | cut -f4)
  [ "$lost $wrong $whole" = "0 0 OK" ] || { echo "kill $kill: $lost lost, $wrong wrong, the table is: $whole"; exit 1; }
  next=$(sql -e 'select coalesce(max(i), -1) + 1 from t.rows')
done
kill $server
wait $server
echo "$kills kills, $(wc -l <acknowledged) acknowledged rows found"
[ -s acknowledged ]
