"""The list of gateways to dial, from the table to the file."""

from __future__ import annotations

import json

from sqlalchemy import insert, update

from sla_server.db import migrate, schema
from sla_server.db.engine import make_engine
from sla_server.db.gateway_list import FILE, GatewayListFile
from tests.support.database import Rig
from tests.support.samples import record_message


def test_the_file_follows_the_table(database, tmp_path):
    engine = make_engine(database.config, database.data_dir)
    migrate.upgrade(engine)
    listing = GatewayListFile(engine, tmp_path)
    path = tmp_path / FILE
    assert not listing.refresh()
    assert not path.exists(), "no list, no file"
    with engine.begin() as connection:
        connection.execute(insert(schema.gateway_list), [{"address": "10.0.0.5:7412", "name": "gw-a"}])
        connection.execute(insert(schema.gateway_list), [{"address": "10.0.0.6:7412"}])
    assert listing.refresh()
    assert json.loads(path.read_text()) == [
        {"name": "gw-a", "address": "10.0.0.5:7412"},
        {"name": "10.0.0.6:7412", "address": "10.0.0.6:7412"},
    ]
    assert not listing.refresh(), "nothing has changed"
    with engine.begin() as connection:
        connection.execute(update(schema.gateway_list).values(is_enabled=False))
    assert listing.refresh()
    assert json.loads(path.read_text()) == []
    assert not GatewayListFile(engine, tmp_path / "none").refresh(), "a directory that is not there is no end"
    engine.dispose()


def test_what_services_records_is_the_list(database, tmp_path):
    engine = make_engine(database.config, database.data_dir)
    migrate.upgrade(engine)
    engine.dispose()
    rig = Rig(database.config, database.data_dir)
    row = {"address": "10.0.0.5:7412", "name": "gw-a", "is_enabled": True}
    rig.feed(record_message([("gateway_list", row)]))
    assert rig.reader.gateway_list() == [{"address": "10.0.0.5:7412", "name": "gw-a"}]
    listing = GatewayListFile(rig.engine, tmp_path)
    assert listing.refresh()
    rig.feed(record_message([("gateway_list", {**row, "is_enabled": False})]))
    assert rig.reader.gateway_list() == []
    assert listing.refresh()
    assert json.loads((tmp_path / FILE).read_text()) == []
    rig.close()
